// The table of everything that one instruction set exports. Included last by isa_*.cpp, which have set ATTNWORKS_ISA and their SIMD header.
#pragma once
#include "exp2.h"
#include "forward.h"
#include "decode.h"
#ifndef ATTNWORKS_AMX
#include "backward.h"
#endif
#include "measure.h"

namespace attnworks::ATTNWORKS_ISA {

#define ATTNWORKS_STRING_(x) #x
#define ATTNWORKS_STRING(x) ATTNWORKS_STRING_(x)

#ifdef ATTNWORKS_AMX
constexpr BackwardKernels backward_kernels = {};
#endif

extern const Kernels kernels;
const Kernels kernels = {ATTNWORKS_STRING(ATTNWORKS_ISA), forward_scratch, forward,          decode_scratch, decode_partial,
                         decode_split,                    decode_merge,    backward_kernels, flops,          read};

}  // namespace attnworks::ATTNWORKS_ISA
