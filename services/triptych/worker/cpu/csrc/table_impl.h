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

#if defined(TRIPTYCH_BF16)
using Activation = Bf16;

static void multiply_bf16(const Product& product, int first, int rows, const std::byte* packed, int panel,
                          const Bf16* w) {
#if defined(TRIPTYCH_AMX)
  multiply_amx(product, first, rows, packed, panel, w);
#else
  multiply_panel<Bf16>(product, first, rows, packed, panel, w);
#endif
}

static void multiply(const Product& product, int first, int rows, int panel, void* scratch) {
  const Panels& weights = *product.weights;
  const std::byte* w = weights.panel(panel);
  if (weights.format == WeightFormat::kInt8) {
    auto* wide = static_cast<Bf16*>(scratch);
    unpack(reinterpret_cast<const int8_t*>(w), weights.padded_inputs, wide);
    multiply_bf16(product, first, rows, w, panel, wide);
  } else {
    multiply_bf16(product, first, rows, w, panel, reinterpret_cast<const Bf16*>(w));
  }
}

static size_t multiply_scratch(int padded_inputs) { return sizeof(Bf16) * kPanel * padded_inputs; }

#else
using Activation = float;

static void enter() {}
static void leave() {}

// From this many tiles of rows on, an int8 panel is unpacked once. Unpacking bfloat16 is cheap enough to do in each
// tile: writing and reading an unpacked panel costs more.
constexpr int kUnpackTiles = 3;

static void multiply(const Product& product, int first, int rows, int panel, void* scratch) {
  const std::byte* packed = product.weights->panel(panel);
  const auto run = [&](const auto* w) { multiply_panel<float>(product, first, rows, packed, panel, w); };
  switch (product.weights->format) {
    case WeightFormat::kF32:
      return run(reinterpret_cast<const float*>(packed));
    case WeightFormat::kBf16:
      return run(reinterpret_cast<const Bf16*>(packed));
    case WeightFormat::kInt8: {
      const auto* w = reinterpret_cast<const int8_t*>(packed);
      if (rows <= (kUnpackTiles - 1) * kTileRows) return run(w);
      unpack(w, product.weights->padded_inputs, static_cast<float*>(scratch));
      return run(static_cast<const float*>(scratch));
    }
  }
}

static size_t multiply_scratch(int padded_inputs) { return sizeof(float) * kPanel * padded_inputs; }
#endif

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
