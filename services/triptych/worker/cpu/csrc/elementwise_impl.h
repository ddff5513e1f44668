// Norm, rotary embedding, cache writes and reductions over one row.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace triptych {
namespace TRIPTYCH_ISA {

// RMSNorm (Zhang and Sennrich, arXiv:1910.07467).
template <class X>
static void norm(const float* x, const float* weight, float epsilon, int n, void* activations) {
  X* to = static_cast<X*>(activations);
  F16 squares0{}, squares1{};
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    const F16 a = load<F16>(x + i), b = load<F16>(x + i + 16);
    squares0 += a * a;
    squares1 += b * b;
  }
  float total = sum(squares0 + squares1);
  for (int j = i; j < n; ++j) total += x[j] * x[j];
  const float scale = 1.0f / __builtin_sqrtf(total / n + epsilon);
  for (i = 0; i + 16 <= n; i += 16) store16(to + i, load<F16>(weight + i) * (load<F16>(x + i) * splat(scale)));
  if (i < n) {
    alignas(64) float rest[16] = {};
    for (int j = i; j < n; ++j) rest[j - i] = weight[j] * (x[j] * scale);
    store16(to + i, load<F16>(rest));  // Buffers are padded to whole vectors.
  }
}

// Rotary position embedding (Su et al., arXiv:2104.09864), feature i with i + head_dim / 2.
static void rotate(float* x, int heads, int head_dim, const float* cosines, const float* sines, float scale) {
  const int half = head_dim / 2;
  for (float* head = x; head < x + heads * head_dim; head += head_dim) {
    int i = 0;
    for (; i + 16 <= half; i += 16) {
      const F16 a = load<F16>(head + i), b = load<F16>(head + half + i);
      const F16 c = load<F16>(cosines + i), s = load<F16>(sines + i);
      store(head + i, (a * c - b * s) * splat(scale));
      store(head + half + i, (b * c + a * s) * splat(scale));
    }
    for (; i < half; ++i) {
      const float a = head[i], b = head[half + i];
      head[i] = (a * cosines[i] - b * sines[i]) * scale;
      head[half + i] = (b * cosines[i] + a * sines[i]) * scale;
    }
  }
}

template <class T>
TRIPTYCH_INLINE void write_row(const float* from, int n, T* to) {
  for (int i = 0; i < n; i += 16) store16(to + i, load<F16>(from + i));
}
static void write_cache(const float* from, int n, CacheType type, void* to) {
  if (type == CacheType::kF32) write_row(from, n, static_cast<float*>(to));
  if (type == CacheType::kBf16) write_row(from, n, static_cast<Bf16*>(to));
  if (type == CacheType::kFp16) write_row(from, n, static_cast<Fp16*>(to));
}

static int argmax(const float* x, int n) {
  F16 best = splat(-__builtin_inff());
  int i = 0;
  for (; i + 16 <= n; i += 16) best = max(load<F16>(x + i), best);
  float largest = maximum(best);
  for (; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  for (i = 0; i < n; ++i)
    if (x[i] == largest) return i;
  return 0;  // Not finite; the caller says so.
}

static bool is_finite(const float* x, int n) {
  for (int i = 0; i < n; ++i)
    if (!(__builtin_fabsf(x[i]) <= __FLT_MAX__)) return false;
  return true;
}

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
