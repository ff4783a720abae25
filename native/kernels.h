// The table of everything that one instruction set exports. Included last by isa_*.cpp, which have set ATTNWORKS_ISA and their SIMD header.
#pragma once
#include "exp2.h"
#include "forward.h"
#include "decode.h"
#ifdef ATTNWORKS_AMX
#include "backward_tiles.h"
#else
#include "backward.h"
#endif
#include "backward_kernels.h"
#include "measure.h"

namespace attnworks::ATTNWORKS_ISA {

#define ATTNWORKS_STRING_(x) #x
#define ATTNWORKS_STRING(x) ATTNWORKS_STRING_(x)

extern const Kernels kernels;
const Kernels kernels = {ATTNWORKS_STRING(ATTNWORKS_ISA),
                         in_tiles ? 32 : 12,
                         forward_scratch,
                         forward,
                         decode_scratch,
                         decode_partial,
                         decode_split,
                         decode_merge,
                         backward_kernels,
                         has_outliers,
                         flops,
                         read};

}  // namespace attnworks::ATTNWORKS_ISA
