// Kernels for AVX-512 F, BW, VL and DQ.
#define TRIPTYCH_ISA avx512
#define TRIPTYCH_ISA_ID Isa::kAvx512
#define TRIPTYCH_TILE_ROWS 12
#include "table_impl.h"
