// Small integer functions. Compiled once per instruction set, hence the namespace.
#pragma once
#include <stdint.h>

namespace attnworks::ATTNWORKS_ISA {

ATTNWORKS_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
ATTNWORKS_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
ATTNWORKS_INLINE int64_t clamp(int64_t x, int64_t lowest, int64_t highest) { return smaller(larger(x, lowest), highest); }
ATTNWORKS_INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

}  // namespace attnworks::ATTNWORKS_ISA
