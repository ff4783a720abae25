// One file per instruction set, each compiled with its own -m flags. Nothing that the linker could merge with another file's copy (std
// templates, inline functions outside namespace attnworks::ATTNWORKS_ISA) may be instantiated here: the merged copy might hold
// instructions that the CPU at hand doesn't have.
#define ATTNWORKS_ISA generic
#include "simd/generic.h"

#include "kernels.h"
