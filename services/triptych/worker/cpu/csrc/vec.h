// Sixteen floats at a time, in the compiler's portable vector types: one source for every instruction set.
//
// Included by the isa_*.cpp files only, each of which is compiled for its own instruction set. Everything is `static`
// and lives in a namespace of its own, so that the linker cannot merge code across instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef TRIPTYCH_ISA
#error "define TRIPTYCH_ISA before including kernels"
#endif

namespace triptych {
namespace TRIPTYCH_ISA {

#define TRIPTYCH_INLINE static inline __attribute__((always_inline))

typedef float F16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef int8_t B16 __attribute__((vector_size(16)));

constexpr int kLanes = 16;

template <class V>
TRIPTYCH_INLINE V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}
template <class V>
TRIPTYCH_INLINE void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}
TRIPTYCH_INLINE F16 splat(float x) { return x - F16{}; }
TRIPTYCH_INLINE F16 max(F16 a, F16 b) { return a > b ? a : b; }

// Element types as they lie in memory.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

// Conversions, where compilers do not find the one instruction by themselves.
#if defined(__AVX512F__)
TRIPTYCH_INLINE U16 to_u32(H16 x) { return (U16)_mm512_cvtepu16_epi32((__m256i)x); }
TRIPTYCH_INLINE H16 to_u16(U16 x) { return (H16)_mm512_cvtepi32_epi16((__m512i)x); }
TRIPTYCH_INLINE F16 to_float(B16 x) { return (F16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x)); }
#else
TRIPTYCH_INLINE U16 to_u32(H16 x) { return __builtin_convertvector(x, U16); }
TRIPTYCH_INLINE H16 to_u16(U16 x) { return __builtin_convertvector(x, H16); }
TRIPTYCH_INLINE F16 to_float(B16 x) { return __builtin_convertvector(__builtin_convertvector(x, I16), F16); }
#endif

TRIPTYCH_INLINE F16 widen(H16 bf16) { return (F16)(to_u32(bf16) << 16); }

// Rounds to the nearest bfloat16, ties to even; a NaN stays one. The processor's own takes what is below 2^-126 for
// zero.
#if defined(__AVX512BF16__) && !defined(TRIPTYCH_EMULATE)
TRIPTYCH_INLINE H16 narrow(F16 x) { return (H16)_mm512_cvtneps_pbh((__m512)x); }
#else
TRIPTYCH_INLINE H16 narrow(F16 x) {
  const U16 bits = (U16)x;
  const U16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return to_u16((x == x) ? rounded : (U16{} + 0x7fc0));
}
#endif

TRIPTYCH_INLINE F16 load16(const float* from) { return load<F16>(from); }
TRIPTYCH_INLINE F16 load16(const Bf16* from) { return widen(load<H16>(from)); }
#if defined(__AVX512F__)
TRIPTYCH_INLINE F16 load16(const Fp16* from) { return (F16)_mm512_cvtph_ps((__m256i)load<H16>(from)); }
#else
TRIPTYCH_INLINE F16 load16(const Fp16* from) {
  const U16 bits = to_u32(load<H16>(from));
  const U16 magnitude = (bits & 0x7fff) << 13;
  // 2^112 moves the exponent from a bias of 15 to one of 127, subnormals included.
  const F16 scaled = (F16)magnitude * splat(0x1p112f);
  const U16 special = (bits & 0x7c00) == 0x7c00 ? (magnitude | 0x7f800000) : (U16)scaled;
  return (F16)(special | (bits & 0x8000) << 16);
}
#endif

TRIPTYCH_INLINE void store16(float* to, F16 x) { store(to, x); }
TRIPTYCH_INLINE void store16(Bf16* to, F16 x) { store(to, narrow(x)); }
#if defined(__AVX512F__)
TRIPTYCH_INLINE void store16(Fp16* to, F16 x) {
  store(to, (H16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
TRIPTYCH_INLINE void store16(Fp16* to, F16 x) {
  const U16 bits = (U16)x, sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  // Normal halves: rebias, round to even on the 13 bits that go. The carry makes 65520 and above infinite.
  const U16 normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Below 2^-14: adding 0.5 lets the float adder round to multiples of 2^-24, the step of subnormal halves.
  const U16 tiny = (U16)((F16)magnitude + splat(0.5f)) - 0x3f000000;
  const U16 large = magnitude > 0x7f800000 ? (U16{} + 0x7e00) : (U16{} + 0x7c00);
  const U16 finite = magnitude < (113u << 23) ? tiny : normal;
  store(to, to_u16((magnitude >= (143u << 23) ? large : finite) | sign));
}
#endif

// Calls work<V>() with the vectors of a head: loops over them are unrolled, and their sums stay in registers.
template <class Work>
TRIPTYCH_INLINE void with_vectors(int head_dim, const Work& work) {
  switch (head_dim / kLanes) {
#define TRIPTYCH_CASE(V) \
  case V:                \
    return work.template operator()<V>();
    TRIPTYCH_CASE(1)
    TRIPTYCH_CASE(2)
    TRIPTYCH_CASE(3)
    TRIPTYCH_CASE(4)
    TRIPTYCH_CASE(5)
    TRIPTYCH_CASE(6)
    TRIPTYCH_CASE(7)
    TRIPTYCH_CASE(8)
    TRIPTYCH_CASE(16)
#undef TRIPTYCH_CASE
  }
}

// e^x, relative error below 2e-7; 0 below -87.3, NaN for NaN. Reduction by powers of two, then a Taylor-like polynomial
// with Cephes' coefficients (Moshier, expf.c).
TRIPTYCH_INLINE F16 exp16(F16 x) {
  const F16 bounded = x > splat(88.0f) ? splat(88.0f) : x;
  const F16 shifted = bounded * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer.
  const F16 n = shifted - splat(12582912.0f);
  F16 r = bounded - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  F16 p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  const F16 scale = (F16)(((U16)shifted << 23) + 0x3f800000);
  return x < splat(-87.3f) ? F16{} : p * scale;
}

// Sums and largest elements of vectors. sum_each: lane i of the result is the sum of v[i]; overwrites v.
// transpose: sixteen vectors of sixteen 32-bit elements, in place.
#if defined(__AVX512F__)
TRIPTYCH_INLINE float sum(F16 v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return v[0] + v[1];
}
TRIPTYCH_INLINE float maximum(F16 v) {
  v = max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return v[0] > v[1] ? v[0] : v[1];
}

// A butterfly: each step halves the number of vectors.
TRIPTYCH_INLINE F16 sum_each(F16* v) {
  for (int i = 0; i < 8; ++i)
    v[i] = __builtin_shufflevector(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
           __builtin_shufflevector(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
  for (int i = 0; i < 4; ++i)
    v[i] = __builtin_shufflevector(v[i], v[i + 4], 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31) +
           __builtin_shufflevector(v[i], v[i + 4], 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  for (int i = 0; i < 2; ++i)
    v[i] = __builtin_shufflevector(v[i], v[i + 2], 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31) +
           __builtin_shufflevector(v[i], v[i + 2], 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
  return __builtin_shufflevector(v[0], v[1], 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31) +
         __builtin_shufflevector(v[0], v[1], 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
}

TRIPTYCH_INLINE void transpose(F16* v) {
  for (int i = 0; i < 8; ++i) {
    const F16 a = v[i], b = v[i + 8];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    v[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int h = 0; h < 16; h += 8)
    for (int i = h; i < h + 4; ++i) {
      const F16 a = v[i], b = v[i + 4];
      v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
      v[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
  for (int h = 0; h < 16; h += 4)
    for (int i = h; i < h + 2; ++i) {
      const F16 a = v[i], b = v[i + 2];
      v[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      v[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  for (int i = 0; i < 16; i += 2) {
    const F16 a = v[i], b = v[i + 1];
    v[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    v[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
}
#else
// Compilers take shuffles of vectors that are wider than a register apart element by element, and long over it.
TRIPTYCH_INLINE float sum(F16 v) {
  float half[8];
  for (int i = 0; i < 8; ++i) half[i] = v[i] + v[i + 8];
  return ((half[0] + half[4]) + (half[2] + half[6])) + ((half[1] + half[5]) + (half[3] + half[7]));
}
TRIPTYCH_INLINE float maximum(F16 v) {
  float largest = v[0];
  for (int i = 1; i < 16; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}
static F16 sum_each(F16* v) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = sum(v[i]);
  return load<F16>(sums);
}
static void transpose(F16* v) {
  float from[16][16], to[16][16];
  __builtin_memcpy(from, v, sizeof(from));
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) to[i][j] = from[j][i];
  __builtin_memcpy(v, to, sizeof(to));
}
#endif

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
