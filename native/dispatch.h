// Which instruction sets were compiled in, and which of them this CPU runs.
#pragma once
#include "attention.h"

#include <string>
#include <vector>

namespace attnworks {

std::vector<std::string> compiled_isas();   // best first
std::vector<std::string> supported_isas();  // best first; CPU and operating system both support them
// The best without AMX: throws where there is none.
const Kernels& kernels_without_tiles();
const Kernels& kernels_for(const std::string& isa);  // throws std::invalid_argument if it isn't supported

}  // namespace attnworks
