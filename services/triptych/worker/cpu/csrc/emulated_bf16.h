// Stand-ins for AVX-512 BF16 and AMX in plain C++, so that tests can run those kernels on any x86-64 with AVX-512.
#pragma once

#include "vec.h"

namespace triptych {
namespace TRIPTYCH_ISA {

TRIPTYCH_INLINE F16 emulated_dpbf16(F16 sum, U16 a, U16 b) {
  sum += (F16)(a & 0xffff0000) * (F16)(b & 0xffff0000);
  return sum + (F16)(a << 16) * (F16)(b << 16);
}

struct EmulatedTile {
  float at[16][16];
};
static thread_local EmulatedTile emulated_tiles[8];
static thread_local bool emulated_configured = false;

TRIPTYCH_INLINE void emulated_tile_loadconfig(const void*) { emulated_configured = true; }
TRIPTYCH_INLINE void emulated_tile_release() { emulated_configured = false; }
TRIPTYCH_INLINE EmulatedTile& emulated_tile(int index) {
  if (!emulated_configured) __builtin_trap();  // What the processor does.
  return emulated_tiles[index];
}
TRIPTYCH_INLINE void emulated_tile_zero(int index) { emulated_tile(index) = {}; }
TRIPTYCH_INLINE void emulated_tile_loadd(int index, const void* from, size_t stride) {
  for (int r = 0; r < 16; ++r) __builtin_memcpy(emulated_tile(index).at[r], (const char*)from + r * stride, 64);
}
TRIPTYCH_INLINE void emulated_tile_stored(int index, void* to, size_t stride) {
  for (int r = 0; r < 16; ++r) __builtin_memcpy((char*)to + r * stride, emulated_tile(index).at[r], 64);
}
static void emulated_tile_dpbf16ps(int sums, int rows, int weights) {
  EmulatedTile& c = emulated_tile(sums);
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k) {
      uint32_t pair;
      __builtin_memcpy(&pair, &emulated_tile(rows).at[m][k], 4);
      const F16 row = load<F16>(c.at[m]);
      store(c.at[m], emulated_dpbf16(row, load<U16>(emulated_tile(weights).at[k]), U16{} + pair));
    }
}

}  // namespace TRIPTYCH_ISA
}  // namespace triptych
