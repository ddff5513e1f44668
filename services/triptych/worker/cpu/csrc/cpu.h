// What this processor can do, asked once at run time.
#pragma once

#include <cstddef>

namespace triptych {

// Instruction sets with kernels of their own, weakest first.
enum class Isa { kBaseline = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// The best instruction set of this processor and operating system. Asks Linux for the AMX tile state when needed.
Isa best_isa();

// Name as the environment variable TRIPTYCH_CPU_ISA spells it.
const char* isa_name(Isa isa);

// Size of one core's level-2 cache in bytes; 1 MiB where the system does not tell.
size_t l2_bytes();

}  // namespace triptych
