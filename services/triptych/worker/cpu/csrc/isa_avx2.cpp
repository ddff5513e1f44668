// Kernels for AVX2 and FMA.
#define TRIPTYCH_ISA avx2
#define TRIPTYCH_ISA_ID Isa::kAvx2
#define TRIPTYCH_TILE_ROWS 3
#include "table_impl.h"
