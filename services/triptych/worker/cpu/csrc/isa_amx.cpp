// Kernels for AMX: products of bfloat16 tiles.
#define TRIPTYCH_ISA amx
#define TRIPTYCH_ISA_ID Isa::kAmx
#define TRIPTYCH_TILE_ROWS 12
#define TRIPTYCH_BF16
#define TRIPTYCH_AMX
#include "table_impl.h"
