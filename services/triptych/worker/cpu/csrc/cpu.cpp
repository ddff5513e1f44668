#include "cpu.h"

#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace triptych {
namespace {

#if defined(__x86_64__)
bool has_avx512_bf16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}

// AMX state is off until a process asks for it (Linux 5.16: arch_prctl ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool has_amx_bf16() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tile = d & (1u << 24), bf16 = d & (1u << 22);
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return tile && bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kBaseline;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return Isa::kAvx2;
  if (!has_avx512_bf16()) return Isa::kAvx512;
  return has_amx_bf16() ? Isa::kAmx : Isa::kAvx512Bf16;
#else
  return Isa::kBaseline;
#endif
}

const char* isa_name(Isa isa) {
  constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16", "amx"};
  return kNames[static_cast<int>(isa)];
}

size_t l2_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  const long size = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (size > 0) return static_cast<size_t>(size);
#endif
  return size_t{1} << 20;
}

}  // namespace triptych
