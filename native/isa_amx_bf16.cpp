#define ATTNWORKS_ISA amx_bf16
#define ATTNWORKS_AVX512_BF16
#define ATTNWORKS_AMX
#include "simd/avx512.h"

#include "kernels.h"
