// Matrix products: every weight is read once for a tile of rows, and a panel is one stream through memory.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace triptych {
namespace TRIPTYCH_ISA {

// Most rows of a tile: with 16 lanes in one register, 12 x 2 accumulators of 32 registers.
#ifndef TRIPTYCH_TILE_ROWS
#error "define TRIPTYCH_TILE_ROWS"
#endif
constexpr int kTileRows = TRIPTYCH_TILE_ROWS;

// Fetches weights before they are needed: hardware prefetchers stop at each 4 KiB page, and know nothing of a panel
// that comes after several passes over this one.
struct Ahead {
  const char* at;      // What corresponds to the first step of a pass,
  int step;            // bytes of it for each step,
  int turn, turns;     // every `turns`th step, beginning with step `turn`.

  // For one pass over a stream: a little further on.
  static inline Ahead stream(const void* w, int step) { return {static_cast<const char*>(w) + 2048, step, 0, 1}; }

  inline __attribute__((always_inline)) void fetch() {
    if (turn == 0) {
      turn = turns;
      if (turns == 1) {
        __builtin_prefetch(at);
        __builtin_prefetch(at + step - 1);
      } else {  // A later panel, for which the level-1 cache has no room.
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + step - 1, 0, 2);
      }
    }
    --turn;
    at += step;
  }
};

// Pointers to rows in groups of three, which addressing modes reach with one register a group.
template <class T>
struct Rows {
  const T* base[4];
  size_t ld;
  TRIPTYCH_INLINE Rows make(const T* x, size_t ld) { return {{x, x + 3 * ld, x + 6 * ld, x + 9 * ld}, ld}; }
  inline __attribute__((always_inline)) const T& at(int row, size_t k) const {
    return base[row / 3][k + static_cast<size_t>(row % 3) * ld];
  }
};

template <int R>
TRIPTYCH_INLINE void begin(F16 (&a)[R][2], const float* c, size_t ldc, bool add) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    a[r][0] = add ? load<F16>(c + r * ldc) : F16{};
    a[r][1] = add ? load<F16>(c + r * ldc + 16) : F16{};
  }
}
template <int R>
TRIPTYCH_INLINE void end(const F16 (&a)[R][2], float* c, size_t ldc) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(c + r * ldc, a[r][0]);
    store(c + r * ldc + 16, a[r][1]);
  }
}
template <int R>
TRIPTYCH_INLINE void accumulate(F16 (&a)[R][2], const Rows<float>& x, size_t k, F16 w0, F16 w1) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const F16 b = splat(x.at(r, k));
    a[r][0] += b * w0;
    a[r][1] += b * w1;
  }
}

// c [R, 32] = x [R, k] times one panel, plus c if `add`. One chain of additions per element, in the order of k, for
// every R: a row's result does not depend on the rows beside it.
template <int R>
static void tile(const float* x, size_t ldx, const float* w, int k, float* c, size_t ldc, bool add, Ahead ahead) {
  F16 a[R][2];
  begin(a, c, ldc, add);
  const auto rows = Rows<float>::make(x, ldx);
  for (int i = 0; i < k; ++i, w += kPanel) {
    ahead.fetch();
    accumulate(a, rows, i, load<F16>(w), load<F16>(w + 16));
  }
  end(a, c, ldc);
}

template <int R>
static void tile(const float* x, size_t ldx, const Bf16* w, int k, float* c, size_t ldc, bool add, Ahead ahead) {
  F16 a[R][2];
  begin(a, c, ldc, add);
  const auto rows = Rows<float>::make(x, ldx);
  for (int i = 0; i < k; i += 2, w += 2 * kPanel) {
    ahead.fetch();
    const U16 w0 = load<U16>(w), w1 = load<U16>(w + kPanel);
    accumulate(a, rows, i, (F16)(w0 << 16), (F16)(w1 << 16));
    accumulate(a, rows, i + 1, (F16)(w0 & 0xffff0000), (F16)(w1 & 0xffff0000));
  }
  end(a, c, ldc);
}

template <int R>
static void tile(const float* x, size_t ldx, const int8_t* w, int k, float* c, size_t ldc, bool add, Ahead ahead) {
  F16 a[R][2];
  begin(a, c, ldc, add);
  const auto rows = Rows<float>::make(x, ldx);
  for (int i = 0; i < k; i += 2, w += 2 * kPanel) {
    ahead.fetch();
    accumulate(a, rows, i, to_float(load<B16>(w)), to_float(load<B16>(w + 16)));
    accumulate(a, rows, i + 1, to_float(load<B16>(w + 32)), to_float(load<B16>(w + 48)));
  }
  end(a, c, ldc);
}

template <class X, class W, int R = kTileRows>
TRIPTYCH_INLINE void tile_of(int rows, const X* x, size_t ldx, const W* w, int k, float* c, size_t ldc, bool add,
                             Ahead ahead) {
  if (rows == R)
    tile<R>(x, ldx, w, k, c, ldc, add, ahead);
  else if constexpr (R > 1)
    tile_of<X, W, R - 1>(rows, x, ldx, w, k, c, ldc, add, ahead);
}

// Bytes of a panel that one step of a tile's loop reads: one input of floats, two of the other formats.
template <class W>
constexpr int kStepBytes = sizeof(W) * kPanel * (sizeof(W) == 4 ? 1 : 2);

// The same for any number of rows, in tiles of about equal height, for a panel that is in the cache.
template <class X, class W>
static void multiply_rows(int rows, const X* x, size_t ldx, const W* w, int k, float* c, size_t ldc, bool add) {
  for (int tiles = (rows + kTileRows - 1) / kTileRows, first = 0; tiles > 0; --tiles) {
    const int height = (rows - first + tiles - 1) / tiles;
    tile_of(height, x + first * ldx, ldx, w, k, c + first * ldc, ldc, add, Ahead{(const char*)w, 0, -1, 1});
    first += height;
  }
}

// Unpacks a whole panel, for products with so many rows that this costs less than unpacking for every tile.
[[maybe_unused]] static void unpack(const int8_t* w, int k, float* to) {
  for (int i = 0; i < k * kPanel; i += 16) store(to + i, to_float(load<B16>(w + i)));
}
// An int8 is exact in bfloat16, so the lower half of its float is zero.
TRIPTYCH_INLINE U16 to_pairs(const int8_t* even, const int8_t* odd) {
  return (U16)to_float(load<B16>(even)) >> 16 | (U16)to_float(load<B16>(odd));
}
[[maybe_unused]] static void unpack(const int8_t* w, int k, Bf16* to) {
  for (int i = 0; i < k; i += 2, w += 2 * kPanel, to += 2 * kPanel) {
    store(to, to_pairs(w, w + kPanel));
    store(to + kPanel, to_pairs(w + 16, w + kPanel + 16));
  }
}

// Finishes rows [first, first + rows) of a panel whose sums are in c [rows, 32].
template <class X>
static void finish(const Product& product, int first, int rows, int panel, const float* c) {
  const Panels& weights = *product.weights;
  const int column = panel * kPanel;
  alignas(64) float scaled[kSummedRows * kPanel];
  if (weights.scales) {
    const F16 s0 = load<F16>(weights.scales + column), s1 = load<F16>(weights.scales + column + 16);
    for (int r = 0; r < rows; ++r) {
      store(scaled + r * kPanel, load<F16>(c + r * kPanel) * s0);
      store(scaled + r * kPanel + 16, load<F16>(c + r * kPanel + 16) * s1);
    }
    c = scaled;
  }
  if (product.finish == Finish::kSwiGlu) {
    for (int r = 0; r < rows; ++r) {
      const F16 gate = load<F16>(c + r * kPanel), up = load<F16>(c + r * kPanel + 16);
      X* to = static_cast<X*>(product.activations) + (first + r) * product.ld_activations + panel * (kPanel / 2);
      store16(to, gate / (splat(1.0f) + exp16(-gate)) * up);
    }
    return;
  }
  const int columns = weights.outputs - column < kPanel ? weights.outputs - column : kPanel;
  const bool adds = product.finish == Finish::kAdd;
  for (int r = 0; r < rows; ++r) {
    float* to = product.out + (first + r) * product.ld_out + column;
    const float* from = c + r * kPanel;
    const float* more = adds ? to : product.bias ? product.bias + column : nullptr;
    if (columns == kPanel) {
      store(to, more ? load<F16>(from) + load<F16>(more) : load<F16>(from));
      store(to + 16, more ? load<F16>(from + 16) + load<F16>(more + 16) : load<F16>(from + 16));
    } else {
      for (int i = 0; i < columns; ++i) to[i] = more ? from[i] + more[i] : from[i];
    }
  }
}

// Rows of a panel in tiles: calls to(row) for where the sums of a tile go, whose first row is that one, then
// done(row, height). `packed` is where the panel comes from: while w is used again and again, the panel after it is
// fetched, a part of it during each pass.
template <class X, class W, class To, class Done>
TRIPTYCH_INLINE void each_tile(const Product& product, int first, int rows, const std::byte* packed, const W* w,
                               const To& to, const Done& done_with) {
  const X* x = static_cast<const X*>(product.x);
  const int k = product.weights->padded_inputs;
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  const int steps = k * kPanel * int(sizeof(W)) / kStepBytes<W>;
  Ahead ahead = Ahead::stream(w, kStepBytes<W>);
  if (tiles > 1)
    ahead = {reinterpret_cast<const char*>(packed) + product.weights->panel_bytes,
             static_cast<int>(product.weights->panel_bytes) / steps, 0, tiles};
  for (int pass = 0, done = 0; pass < tiles; ++pass) {
    const int height = (rows - done + tiles - pass - 1) / (tiles - pass);
    ahead.turn = pass;
    tile_of(height, x + (first + done) * product.ldx, product.ldx, w, k, to(done), kPanel, false, ahead);
    done_with(done, height);
    done += height;
  }
}

template <class X, class W>
static void multiply_panel(const Product& product, int first, int rows, const std::byte* packed, int panel,
                           const W* w) {
  alignas(64) float c[kTileRows * kPanel];
  each_tile<X>(
      product, first, rows, packed, w, [&](int) { return c; },
      [&](int done, int height) { finish<X>(product, first + done, height, panel, c); });
}

// The same without the end: sums [rows, 32] of all rows at once.
template <class X, class W>
static void sum_panel(const Product& product, int rows, const std::byte* packed, const W* w, float* sums) {
  each_tile<X>(
      product, 0, rows, packed, w, [&](int done) { return sums + done * kPanel; }, [](int, int) {});
}

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
