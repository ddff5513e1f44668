// Decode attention over a bfloat16 cache with products of bfloat16 pairs: half of the instructions, as nothing is
// widened. Queries and weights are rounded to bfloat16, as in prefill.
#pragma once

#include "bf16_impl.h"
#include "cache_view.h"
#include "kernels.h"
#include "singles_impl.h"

namespace triptych {
namespace TRIPTYCH_ISA {

template <int V, int H>
  requires(V % 2 == 0)
struct Queries<Bf16, V, H> {
  alignas(64) Bf16 rows[H][16 * V];

  inline __attribute__((always_inline)) Queries(const float* queries, int heads) {
    for (int h = 0; h < heads; ++h)
      for (int i = 0; i < 16 * V; i += 16) store16(rows[h] + i, load<F16>(queries + h * 16 * V + i));
  }

  template <class Done>
  inline __attribute__((always_inline)) void times(const Bf16* from, int heads, const Done& done) const {
    U16 key[V / 2];
#pragma GCC unroll 16
    for (int i = 0; i < V / 2; ++i) key[i] = load<U16>(from + 32 * i);
    for (int h = 0; h < heads; ++h) {
      F16 a{};
#pragma GCC unroll 16
      for (int i = 0; i < V / 2; ++i) a = add_products(a, load<U16>(rows[h] + 32 * i), key[i]);
      done(h, a);
    }
  }
};

template <int V, int G>
  requires(V % 2 == 0)
struct Weigher<Bf16, V, G> {
  static void run(const CacheView<Bf16>& values, const float (*weights)[kMaxPartTokens], int first, int count,
                  int context, bool fetches, float* out) {
    // Two rows are interleaved within 128-bit lanes, so sums come in an order of their own: of every 32 elements, the
    // lower halves of eight in one vector, the upper halves in the next.
    F16 a[G][V];
#pragma GCC unroll 16
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 16
      for (int i = 0; i < V; ++i) a[h][i] = F16{};
    for (int done = 0; done < count; done += kBlockTokens) {
      const Bf16* row = values.block(first + done);
      const Bf16* ahead = values.ahead(first + done, context);
      const int valid = count - done < kBlockTokens ? count - done : kBlockTokens;
      alignas(32) uint32_t pairs[G][kBlockTokens / 2];
#pragma GCC unroll 16
      for (int h = 0; h < G; ++h) store16(reinterpret_cast<Bf16*>(pairs[h]), load<F16>(weights[h] + done));
      for (int t = 0; t < valid; t += 2, row += 2 * values.row, ahead += 2 * values.row) {
        const Bf16* next = t + 1 < valid ? row + values.row : row;  // A weight after the last is zero.
        if (fetches) {
          fetch_row<V>(ahead);
          fetch_row<V>(ahead + values.row);
        }
#pragma GCC unroll 16
        for (int i = 0; i < V; i += 2) {
          const auto even = load<__m512i>(row + 16 * i), odd = load<__m512i>(next + 16 * i);
          const U16 low = (U16)_mm512_unpacklo_epi16(even, odd), high = (U16)_mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 16
          for (int h = 0; h < G; ++h) {
            const U16 pair = U16{} + pairs[h][t / 2];
            a[h][i] = add_products(a[h][i], low, pair);
            a[h][i + 1] = add_products(a[h][i + 1], high, pair);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 16
      for (int i = 0; i < V; i += 2) {
        const F16 low = a[h][i], high = a[h][i + 1];
        store(out + (h * V + i) * 16,
              __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
        store(out + (h * V + i + 1) * 16,
              __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
      }
  }
};

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
