// The portable kernels again, as wide as AVX-512 and with a model of its products of bf16 pairs: these paths run on every machine.
#define ATTNWORKS_ISA generic16
#define ATTNWORKS_GENERIC_WIDTH 16
#define ATTNWORKS_GENERIC_BF16_DOT
#include "../simd/generic.h"

#include "../kernels.h"
