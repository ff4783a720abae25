#define ATTNWORKS_ISA neon
#include "simd/neon.h"

#include "kernels.h"
