// Puts one instruction set's kernels into a table. Included last by each isa_*.cpp, which defines
// TRIPTYCH_ISA (namespace), TRIPTYCH_ISA_ID (Isa), TRIPTYCH_TILE_ROWS and, for bfloat16 products, TRIPTYCH_BF16.
#pragma once

#include "attention_impl.h"
#include "elementwise_impl.h"
#include "expand_impl.h"
#include "gemm_impl.h"
#include "kernels.h"
#if defined(TRIPTYCH_BF16)
#include "bf16_impl.h"
#endif

namespace triptych {
namespace TRIPTYCH_ISA {

#if defined(TRIPTYCH_AMX)
constexpr int kStep = 32;
#else
constexpr int kStep = kTileRows;
#endif

// Most rows for which an int8 panel is unpacked as it is multiplied, in every tile, and not first.
#if defined(TRIPTYCH_AMX)
using Activation = Bf16;
constexpr int kDirectRows = kVectorRows;
#elif defined(TRIPTYCH_BF16)
using Activation = Bf16;
constexpr int kDirectRows = kTileRows;
#else
using Activation = float;
constexpr int kDirectRows = 2 * kTileRows;

static void enter() {}
static void leave() {}
#endif

static size_t multiply_scratch(int padded_inputs) { return sizeof(Activation) * kPanel * padded_inputs; }

// Calls run(packed, w) with a panel as it is kept, and as it is best multiplied by so many rows. Unpacking bfloat16 is
// cheap enough to do in each tile: writing and reading an unpacked panel costs more.
template <class Run>
static void with_panel(const Product& product, int rows, int panel, void* scratch, const Run& run) {
  const std::byte* packed = product.weights->panel(panel);
  switch (product.weights->format) {
    case WeightFormat::kF32:  // Only where activations are floats, too.
      if constexpr (sizeof(Activation) == sizeof(float)) run(packed, reinterpret_cast<const float*>(packed));
      return;
    case WeightFormat::kBf16:
      return run(packed, reinterpret_cast<const Bf16*>(packed));
    case WeightFormat::kInt8: {
      const auto* w = reinterpret_cast<const int8_t*>(packed);
      if (rows <= kDirectRows) return run(packed, w);
      auto* unpacked = static_cast<Activation*>(scratch);
      unpack(w, product.weights->padded_inputs, unpacked);
      return run(packed, static_cast<const Activation*>(unpacked));
    }
  }
}

static void multiply(const Product& product, int first, int rows, int panel, void* scratch) {
  with_panel(product, rows, panel, scratch, [&](const std::byte* packed, const auto* w) {
#if defined(TRIPTYCH_AMX)
    multiply_amx(product, first, rows, packed, panel, w);
#else
    multiply_panel<Activation>(product, first, rows, packed, panel, w);
#endif
  });
}

static void sum(const Product& product, int panel, void* scratch, float* sums) {
  with_panel(product, product.rows, panel, scratch, [&](const std::byte* packed, const auto* w) {
#if defined(TRIPTYCH_AMX)
    sum_amx(product, product.rows, packed, w, sums);
#else
    sum_panel<Activation>(product, product.rows, packed, w, sums);
#endif
  });
}

static void finish_sums(const Product& product, int panel, const float* sums) {
  finish<Activation>(product, 0, product.rows, panel, sums);
}

// Half of the level-2 cache for the rows; the panel and the sums share the other half.
static int row_block(int padded_inputs) {
  const size_t rows = l2_bytes() / 2 / (sizeof(Activation) * padded_inputs);
  const size_t bounded = rows < 2 * kStep ? 2 * kStep : rows > 384 ? 384 : rows;
  return static_cast<int>(bounded / kStep * kStep);
}

extern const Kernels kTable;
const Kernels kTable = {
    TRIPTYCH_ISA_ID,
    sizeof(Activation) == 2,
    multiply_scratch,
    TileBuffers<Activation>::bytes,
    row_block,
    enter,
    leave,
    multiply,
    sum,
    finish_sums,
    norm<Activation>,
    rotate,
    write_cache,
    decode_part,
    expand,
    join_parts<Activation>,
    prefill_tile<Activation>,
    argmax,
    is_finite,
};

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
