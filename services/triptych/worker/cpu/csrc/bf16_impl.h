// Products of bfloat16 by bfloat16: AVX-512 BF16 for few rows, AMX tiles for more where there are any.
// The result of a dot product is rounded to float as it accumulates; activations were rounded to bfloat16 before.
#pragma once

#include "gemm_impl.h"

#if defined(TRIPTYCH_EMULATE)
#include "emulated_bf16.h"
#define _tile_loadconfig emulated_tile_loadconfig
#define _tile_release emulated_tile_release
#define _tile_zero emulated_tile_zero
#define _tile_loadd emulated_tile_loadd
#define _tile_stored emulated_tile_stored
#define _tile_dpbf16ps emulated_tile_dpbf16ps
#endif

namespace triptych {
namespace TRIPTYCH_ISA {

TRIPTYCH_INLINE F16 add_products(F16 sum, U16 a, U16 b) {
#if defined(TRIPTYCH_EMULATE)
  return emulated_dpbf16(sum, a, b);
#else
  return (F16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
}

// Weights of two inputs for all 32 outputs, in pairs.
TRIPTYCH_INLINE void load_pairs(const Bf16* w, U16& w0, U16& w1) {
  w0 = load<U16>(w);
  w1 = load<U16>(w + kPanel);
}
TRIPTYCH_INLINE void load_pairs(const int8_t* w, U16& w0, U16& w1) {
  w0 = to_pairs(w, w + kPanel);
  w1 = to_pairs(w + 16, w + kPanel + 16);
}

template <int R, class W>
static void tile(const Bf16* x, size_t ldx, const W* w, int k, float* c, size_t ldc, bool add, Ahead ahead) {
  F16 a[R][2];
  begin(a, c, ldc, add);
  const auto rows = Rows<Bf16>::make(x, ldx);
  for (int i = 0; i < k; i += 2, w += 2 * kPanel) {
    ahead.fetch();
    U16 w0, w1;
    load_pairs(w, w0, w1);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      uint32_t pair;
      __builtin_memcpy(&pair, &rows.at(r, i), 4);
      a[r][0] = add_products(a[r][0], w0, U16{} + pair);
      a[r][1] = add_products(a[r][1], w1, U16{} + pair);
    }
  }
  end(a, c, ldc);
}

#if defined(TRIPTYCH_AMX)

// Up to this many rows the vector unit keeps up with memory, and a tile of sixteen would be mostly empty.
constexpr int kVectorRows = 3;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

static void enter() {
  const TileConfig config;
  _tile_loadconfig(&config);
}
static void leave() { _tile_release(); }

// c [16 * H, 32] = x [16 * H, k] times one panel. Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights.
template <int H>
static void amx_tile(const Bf16* x, size_t ldx, const Bf16* w, int k, float* c, size_t ldc, bool add,
                     const char* ahead) {
  const size_t x_bytes = ldx * sizeof(Bf16), c_bytes = ldc * sizeof(float), w_bytes = 2 * kPanel * sizeof(Bf16);
  if (add) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
    if constexpr (H == 2) {
      _tile_loadd(2, c + 16 * ldc, c_bytes);
      _tile_loadd(3, c + 16 * ldc + 16, c_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (H == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int i = 0; i < k; i += 32, w += 32 * kPanel) {
    if (ahead)
      for (int line = 0; line < 32; ++line) __builtin_prefetch(ahead + i * kPanel * sizeof(Bf16) + 64 * line);
    _tile_loadd(4, x + i, x_bytes);
    _tile_loadd(6, w, w_bytes);
    _tile_loadd(7, w + kPanel, w_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (H == 2) {
      _tile_loadd(5, x + 16 * ldx + i, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  if constexpr (H == 2) {
    _tile_stored(2, c + 16 * ldc, c_bytes);
    _tile_stored(3, c + 16 * ldc + 16, c_bytes);
  }
}

// Reads and writes up to fifteen rows more than asked; buffers have kSpareRows for that. k is a multiple of 32.
static void multiply_rows(int rows, const Bf16* x, size_t ldx, const Bf16* w, int k, float* c, size_t ldc, bool add) {
  int first = 0;
  for (; rows - first > 16; first += 32) amx_tile<2>(x + first * ldx, ldx, w, k, c + first * ldc, ldc, add, nullptr);
  if (first < rows) amx_tile<1>(x + first * ldx, ldx, w, k, c + first * ldc, ldc, add, nullptr);
}

// As multiply_panel, with AMX tiles for more than kVectorRows rows. The last pass fetches the panel after this one.
static void multiply_amx(const Product& product, int first, int rows, const std::byte* packed, int panel,
                         const Bf16* w) {
  if (rows <= kVectorRows) return multiply_panel<Bf16>(product, first, rows, packed, panel, w);
  const int k = product.weights->padded_inputs;
  alignas(64) float c[32 * kPanel];
  for (int done = 0; done < rows; done += 32) {
    const int height = rows - done < 32 ? rows - done : 32;
    const Bf16* x = static_cast<const Bf16*>(product.x) + (first + done) * product.ldx;
    const bool last = done + 32 >= rows;
    // One pass only: weights come from memory just now, so what is next in it is needed sooner than the next panel.
    const char* ahead = reinterpret_cast<const char*>(w) + (rows <= 32 ? 4096 : product.weights->panel_bytes);
    if (height > 16)
      amx_tile<2>(x, product.ldx, w, k, c, kPanel, false, last ? ahead : nullptr);
    else
      amx_tile<1>(x, product.ldx, w, k, c, kPanel, false, last ? ahead : nullptr);
    finish<Bf16>(product, first + done, height, panel, c);
  }
}

// int8 comes here as it is for few rows only.
static void multiply_amx(const Product& product, int first, int rows, const std::byte* packed, int panel,
                         const int8_t* w) {
  multiply_panel<Bf16>(product, first, rows, packed, panel, w);
}
static void sum_amx(const Product& product, int rows, const std::byte* packed, const int8_t* w, float* sums) {
  sum_panel<Bf16>(product, rows, packed, w, sums);
}

// As sum_panel; sums are [32, 32].
static void sum_amx(const Product& product, int rows, const std::byte* packed, const Bf16* w, float* sums) {
  if (rows <= kVectorRows) return sum_panel<Bf16>(product, rows, packed, w, sums);
  const Bf16* x = static_cast<const Bf16*>(product.x);
  const char* ahead = reinterpret_cast<const char*>(w) + 4096;
  const int k = product.weights->padded_inputs;
  if (rows > 16)
    amx_tile<2>(x, product.ldx, w, k, sums, kPanel, false, ahead);
  else
    amx_tile<1>(x, product.ldx, w, k, sums, kPanel, false, ahead);
}

#else

static void enter() {}
static void leave() {}

#endif

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
