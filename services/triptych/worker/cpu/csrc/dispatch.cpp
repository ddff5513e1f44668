// Chooses a table of kernels.
#include "kernels.h"

namespace triptych {

#define TRIPTYCH_TABLE(isa)  \
  namespace isa {            \
  extern const Kernels kTable; \
  }
#if !defined(__x86_64__) || defined(TRIPTYCH_EMULATE)
#define TRIPTYCH_HAS_BASELINE  // On x86-64 it would be slower than torch; the tests' build has it.
TRIPTYCH_TABLE(baseline)
#endif
#if defined(__x86_64__)
TRIPTYCH_TABLE(avx2)
TRIPTYCH_TABLE(avx512)
TRIPTYCH_TABLE(avx512_bf16)
TRIPTYCH_TABLE(amx)
#endif

const Kernels& kernels_for(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAmx:
      return amx::kTable;
    case Isa::kAvx512Bf16:
      return avx512_bf16::kTable;
    case Isa::kAvx512:
      return avx512::kTable;
    case Isa::kAvx2:
      return avx2::kTable;
#endif
#if defined(TRIPTYCH_HAS_BASELINE)
    default:
      return baseline::kTable;
#else
    default:
      return avx2::kTable;
#endif
  }
}

}  // namespace triptych
