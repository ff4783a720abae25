#include "dispatch.h"

#include <stdexcept>

#ifdef ATTNWORKS_WITH_amx_bf16
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attnworks {

// CMake defines ATTNWORKS_WITH_<isa> for every per-ISA file that this compiler could build.
#define ATTNWORKS_DECLARE(isa) \
  namespace isa {              \
  extern const Kernels kernels; \
  }
#ifdef ATTNWORKS_WITH_generic
ATTNWORKS_DECLARE(generic)
#endif
#ifdef ATTNWORKS_WITH_avx2
ATTNWORKS_DECLARE(avx2)
#endif
#ifdef ATTNWORKS_WITH_avx512
ATTNWORKS_DECLARE(avx512)
#endif
#ifdef ATTNWORKS_WITH_avx512_bf16
ATTNWORKS_DECLARE(avx512_bf16)
#endif
#ifdef ATTNWORKS_WITH_amx_bf16
ATTNWORKS_DECLARE(amx_bf16)
#endif
#ifdef ATTNWORKS_WITH_neon
ATTNWORKS_DECLARE(neon)
#endif

namespace {

struct Entry {
  const Kernels* kernels;
  bool supported;
};

#ifdef ATTNWORKS_WITH_amx_bf16
// Linux hands out the 8 KiB of tile registers only to processes that ask (kernel documentation, "Using XSTATE features in user space applications").
bool amx_bf16_usable() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool has_bf16 = edx >> 22 & 1, has_tiles = edx >> 24 & 1;
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return has_bf16 && has_tiles && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

// __builtin_cpu_supports also asks (by xgetbv) whether the operating system saves the wide registers.
std::vector<Entry> entries() {
  std::vector<Entry> all;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  [[maybe_unused]] const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
#ifdef ATTNWORKS_WITH_amx_bf16
  all.push_back({&amx_bf16::kernels, avx512 && __builtin_cpu_supports("avx512bf16") && amx_bf16_usable()});
#endif
#ifdef ATTNWORKS_WITH_avx512_bf16
  all.push_back({&avx512_bf16::kernels, avx512 && __builtin_cpu_supports("avx512bf16")});
#endif
#ifdef ATTNWORKS_WITH_avx512
  all.push_back({&avx512::kernels, avx512});
#endif
#ifdef ATTNWORKS_WITH_avx2
  all.push_back({&avx2::kernels, avx2});
#endif
#ifdef ATTNWORKS_WITH_neon
  all.push_back({&neon::kernels, true});
#endif
#ifdef ATTNWORKS_WITH_generic
  all.push_back({&generic::kernels, true});
#endif
  return all;
}

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : entries()) names.push_back(entry.kernels->isa);
  return names;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : entries())
    if (entry.supported) names.push_back(entry.kernels->isa);
  return names;
}

const Kernels& kernels_without_tiles() {
  for (const Entry& entry : entries())
    if (entry.supported && !entry.kernels->has_outliers) return *entry.kernels;
  throw std::logic_error("this build has no kernels without tiles");
}

const Kernels& kernels_for(const std::string& isa) {
  std::string supported;
  for (const Entry& entry : entries()) {
    if (!entry.supported) continue;
    if (entry.kernels->isa == isa) return *entry.kernels;
    supported += (supported.empty() ? "" : ", ") + std::string(entry.kernels->isa);
  }
  throw std::invalid_argument("isa was '" + isa + "', this CPU runs: " + supported);
}

}  // namespace attnworks
