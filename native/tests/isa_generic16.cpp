// The portable kernels again, as wide as AVX-512: the paths for 16 lanes run on every machine.
#define ATTNWORKS_ISA generic16
#define ATTNWORKS_GENERIC_WIDTH 16
#include "../simd/generic.h"

#include "../kernels.h"
