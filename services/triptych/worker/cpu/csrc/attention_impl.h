// Attention over the paged cache, in place: nothing is gathered but one tile of keys and values at a time.
#pragma once

#include "cache_view.h"
#include "gemm_impl.h"
#include "kernels.h"
#include "singles_impl.h"
#include "vec.h"
#if defined(TRIPTYCH_BF16)
#include "pairs_impl.h"
#endif

namespace triptych {
namespace TRIPTYCH_ISA {

// scores[h][token - first] = queries[h] . key, -inf after the last; whole blocks.
template <class T, int V>
static void score_part(const CacheView<T>& keys, const float* queries, int group, int first, int count, int context,
                       float (*scores)[kMaxPartTokens]) {
  constexpr int kHeadsAtOnce = 4;
  for (int h0 = 0; h0 < group; h0 += kHeadsAtOnce) {
    const int heads = group - h0 < kHeadsAtOnce ? group - h0 : kHeadsAtOnce;
    const Queries<T, V, kHeadsAtOnce> some(queries + h0 * 16 * V, heads);
    for (int done = 0; done < count; done += kBlockTokens) {
      F16 sums[kHeadsAtOnce][kBlockTokens];
      const T* block = keys.block(first + done);
      const T* ahead = keys.ahead(first + done, context);
      const int valid = count - done < kBlockTokens ? count - done : kBlockTokens;
      for (int t = 0; t < kBlockTokens; ++t) {
        if (t >= valid) {
          for (int h = 0; h < heads; ++h) sums[h][t] = F16{};
          continue;
        }
        if (h0 == 0) fetch_row<V>(ahead + t * keys.row);
        some.times(block + t * keys.row, heads, [&](int h, F16 products) { sums[h][t] = products; });
      }
      for (int h = 0; h < heads; ++h) store(scores[h0 + h] + done, masked(sum_each(sums[h]), valid));
    }
  }
}

template <class T, int V>
static void decode_part_of(const AttentionShape& shape, const float* queries, const KeyRange& range,
                           float* partial) {
  const int32_t* table = range.table;
  const int first = range.first, count = range.count, context = range.context;
  const int head_dim = 16 * V, group = shape.heads / shape.kv_heads;
  float* extremes = partial + static_cast<size_t>(shape.heads) * head_dim;
  // As many heads together as accumulators fit into registers.
  constexpr int kGroup = V <= 4 ? 4 : V <= 6 ? 3 : V <= 8 ? 2 : 1;
  for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    const auto keys = CacheView<T>::make(shape, shape.keys, kv_head, table);
    const auto values = CacheView<T>::make(shape, shape.values, kv_head, table);
    for (int h0 = 0; h0 < group; h0 += 8) {
      const int heads = group - h0 < 8 ? group - h0 : 8;
      const size_t head = static_cast<size_t>(kv_head) * group + h0;
      alignas(64) float scores[8][kMaxPartTokens];
      score_part<T, V>(keys, queries + head * head_dim, heads, first, count, context, scores);
      for (int h = 0; h < heads; ++h) {
        if (range.bias)
          for (int t = 0; t < count; t += 16)
            store(scores[h] + t, load<F16>(scores[h] + t) + load<F16>(range.bias + first + t));
        F16 largest = load<F16>(scores[h]), total{};
        for (int t = 16; t < count; t += 16) largest = max(load<F16>(scores[h] + t), largest);
        const float top = maximum(largest);
        for (int t = 0; t < count; t += 16) {
          const F16 weight = exp16(load<F16>(scores[h] + t) - splat(top));
          store(scores[h] + t, weight);
          total += weight;
        }
        extremes[(head + h) * 2] = top;
        extremes[(head + h) * 2 + 1] = sum(total);
      }
      float* out = partial + head * head_dim;
      int h = 0;
      for (; h + kGroup <= heads; h += kGroup)
        Weigher<T, V, kGroup>::run(values, scores + h, first, count, context, h == 0, out + h * head_dim);
      if constexpr (kGroup > 3)
        if (heads - h == 3) {
          Weigher<T, V, 3>::run(values, scores + h, first, count, context, h == 0, out + h * head_dim);
          h += 3;
        }
      if constexpr (kGroup > 2)
        if (heads - h == 2) {
          Weigher<T, V, 2>::run(values, scores + h, first, count, context, h == 0, out + h * head_dim);
          h += 2;
        }
      if constexpr (kGroup > 1)
        if (heads - h == 1)
          Weigher<T, V, 1>::run(values, scores + h, first, count, context, h == 0, out + h * head_dim);
    }
  }
}

template <class T>
TRIPTYCH_INLINE void decode_part_as(const AttentionShape& shape, const float* queries, const KeyRange& range,
                                    float* partial) {
  with_vectors(shape.head_dim, [&]<int V>() { decode_part_of<T, V>(shape, queries, range, partial); });
}

static void decode_part(const AttentionShape& shape, const float* queries, const KeyRange& range, float* partial) {
  if (shape.cache_type == CacheType::kF32) decode_part_as<float>(shape, queries, range, partial);
  if (shape.cache_type == CacheType::kBf16) decode_part_as<Bf16>(shape, queries, range, partial);
  if (shape.cache_type == CacheType::kFp16) decode_part_as<Fp16>(shape, queries, range, partial);
}

// Softmax over parts from each part's own maximum and sum (Milakov and Gimelshein, arXiv:1805.02867).
template <class X>
static void join_parts(const float* partials, int parts, int heads, int head_dim, void* activations) {
  X* to = static_cast<X*>(activations);
  const size_t stride = partial_floats(heads, head_dim);
  const float* extremes = partials + static_cast<size_t>(heads) * head_dim;
  for (int head = 0; head < heads; ++head) {
    float top = extremes[2 * head];
    for (int part = 1; part < parts; ++part) {
      const float other = extremes[part * stride + 2 * head];
      top = other > top ? other : top;
    }
    float total = 0;
    for (int part = 0; part < parts; ++part) {
      const float* e = extremes + part * stride + 2 * head;
      total += exp16(splat(e[0] - top))[0] * e[1];
    }
    for (int i = 0; i < head_dim; i += 16) {
      F16 sum{};
      for (int part = 0; part < parts; ++part) {
        const float scale = exp16(splat(extremes[part * stride + 2 * head] - top))[0];
        sum += splat(scale) * load<F16>(partials + part * stride + head * head_dim + i);
      }
      store16(to + head * head_dim + i, sum * splat(1 / total));
    }
  }
}

// Keys of up to sixteen tokens of one block as columns [column, column + 16) of a panel [head_dim][32].
template <class T>
static void pack_keys(const T* block, size_t row, int valid, int head_dim, int column, float* panel) {
  for (int i = 0; i < head_dim; i += 16) {
    F16 v[16];
    for (int t = 0; t < 16; ++t) v[t] = t < valid ? load16(block + t * row + i) : F16{};
    transpose(v);
    for (int j = 0; j < 16; ++j) store(panel + (i + j) * kPanel + column, v[j]);
  }
}
// The same as pairs of features, [head_dim / 2][32][2].
template <class T>
TRIPTYCH_INLINE void narrow_row(const T* from, int head_dim, Bf16* to) {
  for (int i = 0; i < head_dim; i += 16) store16(to + i, load16(from + i));
}
template <class T>
static void pack_keys(const T* block, size_t row, int valid, int head_dim, int column, Bf16* panel) {
  alignas(64) Bf16 narrow[16][256];
  const int padded = static_cast<int>(round_up(head_dim, 32));
  for (int t = 0; t < 16; ++t) {
    if (t < valid) narrow_row(block + t * row, head_dim, narrow[t]);
    for (int i = t < valid ? head_dim : 0; i < padded; i += 16) store(narrow[t] + i, H16{});
  }
  for (int i = 0; i < padded; i += 32) {
    F16 v[16];
    for (int t = 0; t < 16; ++t) v[t] = load<F16>(narrow[t] + i);
    transpose(v);
    for (int j = 0; j < 16; ++j) store(panel + ((i / 2 + j) * kPanel + column) * 2, v[j]);
  }
}

// Values of tokens [0, 16) of one block as rows [token, token + 16) of panels [kKeyTokens][32].
template <class T>
static void pack_values(const T* block, size_t row, int valid, int head_dim, int token, float* panels) {
  for (int t = 0; t < 16; ++t)
    for (int i = 0; i < head_dim; i += 16)
      store(panels + (i / kPanel * kKeyTokens + token + t) * kPanel + i % kPanel,
            t < valid ? load16(block + t * row + i) : F16{});
}
// The same as pairs of tokens, [kKeyTokens / 2][32][2].
template <class T>
static void pack_values(const T* block, size_t row, int valid, int head_dim, int token, Bf16* panels) {
  for (int t = 0; t < 16; t += 2)
    for (int i = 0; i < head_dim; i += 16) {
      const U16 even = t < valid ? (U16)load16(block + t * row + i) : U16{};
      const U16 odd = t + 1 < valid ? (U16)load16(block + (t + 1) * row + i) : U16{};
      const U16 low = to_u32(narrow((F16)even));
      const U16 high = to_u32(narrow((F16)odd)) << 16;
      store(panels + i / kPanel * kKeyTokens * kPanel + ((token + t) / 2 * kPanel + i % kPanel) * 2, low | high);
    }
}

// Buffers of one prefill tile. X is the type of what is multiplied: float or Bf16.
template <class X>
struct TileBuffers {
  static constexpr size_t kRows = kQueryRows + kSpareRows;

  X* queries;     // [kRows, padded_dim]
  X* weights;     // [kRows, kKeyTokens]
  X* keys;        // kKeyTokens / 32 panels of padded_dim rows
  X* values;      // padded_dim / 32 panels of kKeyTokens rows
  float* scores;  // [kRows, kKeyTokens]
  float* output;  // [kRows, padded_dim]
  float* top;     // [kRows]
  float* total;   // [kRows]

  static size_t bytes(int head_dim) {
    const size_t dim = round_up(head_dim, 32);
    return sizeof(X) * (kRows * (dim + kKeyTokens) + 2 * dim * kKeyTokens) +
           sizeof(float) * kRows * (kKeyTokens + dim + 2) + 64;
  }
  static TileBuffers in(void* scratch, int head_dim) {
    const size_t dim = round_up(head_dim, 32);
    TileBuffers b;
    b.queries = static_cast<X*>(scratch);
    b.weights = b.queries + kRows * dim;
    b.keys = b.weights + kRows * kKeyTokens;
    b.values = b.keys + dim * kKeyTokens;
    b.scores = reinterpret_cast<float*>(b.values + dim * kKeyTokens);
    b.output = b.scores + kRows * kKeyTokens;
    b.top = b.output + kRows * dim;
    b.total = b.top + kRows;
    return b;
  }
};

// One row's scores to weights, its sums so far rescaled (online softmax, Milakov and Gimelshein, arXiv:1805.02867).
// Keys from `visible` on are masked; visible > 0.
template <class X>
TRIPTYCH_INLINE void weigh_row(const TileBuffers<X>& b, int row, int visible, int dim) {
  const I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  constexpr int kVectors = kKeyTokens / 16;
  F16 score[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    score[i] = load<F16>(b.scores + row * kKeyTokens + 16 * i);
    if (visible < kKeyTokens) score[i] = lane + 16 * i < visible ? score[i] : splat(-__builtin_inff());
  }
  F16 largest = score[0];
#pragma GCC unroll 16
  for (int i = 1; i < kVectors; ++i) largest = max(score[i], largest);
  const float found = maximum(largest), before = b.top[row];
  const float top = found > before ? found : before;
  F16 total{};
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    const F16 weight = exp16(score[i] - splat(top));
    store16(b.weights + row * kKeyTokens + 16 * i, weight);
    total += weight;
  }
  if (top == before) {
    b.total[row] += sum(total);
    return;
  }
  const float fade = exp16(splat(before - top))[0];  // 0 the first time: before is -inf.
  b.top[row] = top;
  b.total[row] = b.total[row] * fade + sum(total);
  for (int i = 0; i < dim; i += 16)
    store(b.output + row * dim + i, load<F16>(b.output + row * dim + i) * splat(fade));
}

template <class X, class T>
static void prefill_tile_of(const AttentionShape& shape, int kv_head, const float* queries, size_t ld_queries,
                            int tokens, int position, const int32_t* table, void* activations, size_t ld_activations,
                            void* scratch) {
  const int head_dim = shape.head_dim, group = shape.heads / shape.kv_heads, rows = tokens * group;
  const int dim = static_cast<int>(round_up(head_dim, 32));
  const auto b = TileBuffers<X>::in(scratch, head_dim);
  for (int row = 0; row < rows; ++row) {
    const float* query = queries + row / group * ld_queries + row % group * head_dim;
    for (int i = 0; i < dim; i += 16) {
      store16(b.queries + row * dim + i, i < head_dim ? load<F16>(query + i) : F16{});
      store(b.output + row * dim + i, F16{});
    }
    b.top[row] = -__builtin_inff();
    b.total[row] = 0;
  }
  if (dim > head_dim)  // The last panels are half empty.
    for (int i = 0; i < dim * kKeyTokens; ++i) b.keys[i] = b.values[i] = X{};
  const auto keys = CacheView<T>::make(shape, shape.keys, kv_head, table);
  const auto values = CacheView<T>::make(shape, shape.values, kv_head, table);
  const int end = position + tokens;
  for (int first = 0; first < end; first += kKeyTokens) {
    for (int t = 0; t < kKeyTokens; t += kBlockTokens) {
      const int valid = end - first - t;
      const T* key = valid > 0 ? keys.block(first + t) : keys.base;
      const T* value = valid > 0 ? values.block(first + t) : values.base;
      pack_keys(key, keys.row, valid, head_dim, t % kPanel, b.keys + t / kPanel * dim * kPanel);
      pack_values(value, values.row, valid, head_dim, t, b.values);
    }
    // Rows whose token comes before this tile's first key see nothing of it.
    const int hidden = first > position ? (first - position) * group : 0;
    const int seen = rows - hidden;
    for (int panel = 0; panel < kKeyTokens / kPanel; ++panel)
      multiply_rows(seen, b.queries + hidden * dim, dim, b.keys + panel * dim * kPanel, dim,
                    b.scores + hidden * kKeyTokens + panel * kPanel, kKeyTokens, false);
    for (int row = hidden; row < rows; ++row) weigh_row(b, row, position + row / group + 1 - first, dim);
    for (int panel = 0; panel < dim / kPanel; ++panel)
      multiply_rows(seen, b.weights + hidden * kKeyTokens, kKeyTokens, b.values + panel * kKeyTokens * kPanel,
                    kKeyTokens, b.output + hidden * dim + panel * kPanel, dim, true);
  }
  for (int row = 0; row < rows; ++row) {
    X* to = static_cast<X*>(activations) + row / group * ld_activations + (kv_head * group + row % group) * head_dim;
    const F16 scale = splat(1 / b.total[row]);
    for (int i = 0; i < head_dim; i += 16) store16(to + i, load<F16>(b.output + row * dim + i) * scale);
  }
}

template <class X>
static void prefill_tile(const AttentionShape& shape, int kv_head, const float* queries, size_t ld_queries, int tokens,
                         int position, const int32_t* table, void* activations, size_t ld_activations, void* scratch) {
  const auto run = shape.cache_type == CacheType::kF32    ? prefill_tile_of<X, float>
                   : shape.cache_type == CacheType::kBf16 ? prefill_tile_of<X, Bf16>
                                                          : prefill_tile_of<X, Fp16>;
  run(shape, kv_head, queries, ld_queries, tokens, position, table, activations, ld_activations, scratch);
}

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
