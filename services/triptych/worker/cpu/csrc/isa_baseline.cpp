// Kernels in what every processor of the target has.
#define TRIPTYCH_ISA baseline
#define TRIPTYCH_ISA_ID Isa::kBaseline
#define TRIPTYCH_TILE_ROWS 2
#include "table_impl.h"
