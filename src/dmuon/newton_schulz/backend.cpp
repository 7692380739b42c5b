#include "dmuon/newton_schulz/backend.h"

namespace dmuon::newton_schulz {

const Backend& backend_of(c10::Device device) {
  return device.is_cpu() ? cpu_backend() : aten_backend();
}

}  // namespace dmuon::newton_schulz
