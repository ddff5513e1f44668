// Kernels for AVX-512 BF16: products of bfloat16 pairs.
#define TRIPTYCH_ISA avx512_bf16
#define TRIPTYCH_ISA_ID Isa::kAvx512Bf16
#define TRIPTYCH_TILE_ROWS 12
#define TRIPTYCH_BF16
#include "table_impl.h"
