// Decode attention's arithmetic, element by element, whatever the cache's type.
#pragma once

#include "cache_view.h"
#include "kernels.h"
#include "vec.h"

namespace triptych {
namespace TRIPTYCH_ISA {

// Up to H queries [heads, 16 * V], as keys of type T are multiplied by them.
template <class T, int V, int H>
struct Queries {
  const float* rows;

  inline __attribute__((always_inline)) Queries(const float* queries, int) : rows(queries) {}

  // Calls done(head, products), whose sum is the score, for one key.
  template <class Done>
  inline __attribute__((always_inline)) void times(const T* from, int heads, const Done& done) const {
    F16 key[V];
#pragma GCC unroll 16
    for (int i = 0; i < V; ++i) key[i] = load16(from + 16 * i);
    for (int h = 0; h < heads; ++h) {
      const float* query = rows + h * 16 * V;
      F16 a = load<F16>(query) * key[0];
#pragma GCC unroll 16
      for (int i = 1; i < V; ++i) a += load<F16>(query + 16 * i) * key[i];
      done(h, a);
    }
  }
};

// out[h] = sum of weights[h][token] * value, for G heads.
template <class T, int V, int G>
struct Weigher {
  static void run(const CacheView<T>& values, const float (*weights)[kMaxPartTokens], int first, int count,
                  int context, bool fetches, float* out) {
    F16 a[G][V];
#pragma GCC unroll 16
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 16
      for (int i = 0; i < V; ++i) a[h][i] = F16{};
    for (int done = 0; done < count; done += kBlockTokens) {
      const T* row = values.block(first + done);
      const T* ahead = values.ahead(first + done, context);
      const int valid = count - done < kBlockTokens ? count - done : kBlockTokens;
      for (int t = 0; t < valid; ++t, row += values.row, ahead += values.row) {
        if (fetches) fetch_row<V>(ahead);
#pragma GCC unroll 16
        for (int i = 0; i < V; ++i) {
          const F16 value = load16(row + 16 * i);
#pragma GCC unroll 16
          for (int h = 0; h < G; ++h) a[h][i] += splat(weights[h][done + t]) * value;
        }
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 16
      for (int i = 0; i < V; ++i) store(out + (h * V + i) * 16, a[h][i]);
  }
};

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
