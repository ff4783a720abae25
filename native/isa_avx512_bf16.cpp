#define ATTNWORKS_ISA avx512_bf16
#define ATTNWORKS_AVX512_BF16
#include "simd/avx512.h"

#include "kernels.h"
