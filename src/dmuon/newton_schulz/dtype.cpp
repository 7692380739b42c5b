#include "dmuon/newton_schulz/dtype.h"

#include <cpuinfo.h>

namespace dmuon::newton_schulz {

bool cpu_multiplies_bf16() {
  static const bool answer =
      cpuinfo_initialize() &&
      (cpuinfo_has_x86_avx512bf16() || cpuinfo_has_x86_amx_bf16() || cpuinfo_has_arm_bf16());
  return answer;
}

c10::ScalarType default_dtype(c10::Device device) {
  if (!device.is_cpu()) return c10::ScalarType::Half;
  return cpu_multiplies_bf16() ? c10::ScalarType::BFloat16 : c10::ScalarType::Float;
}

}  // namespace dmuon::newton_schulz
