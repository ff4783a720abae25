#define ATTNWORKS_ISA avx2
#include "simd/avx2.h"

#include "kernels.h"
