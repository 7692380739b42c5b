#include "dmuon/newton_schulz/elementwise.h"

#include <algorithm>

#include "dmuon/newton_schulz/cuda_kernels.h"
#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::newton_schulz {

Start Elementwise::start(const MomentumStep& step, at::ScalarType dtype, double eps) const {
  return start_of(move_momentum(step), dtype, eps);
}

Start Elementwise::start_of(const at::Tensor& direction, at::ScalarType dtype, double eps) const {
  const at::Tensor x =
      normalise(direction.reshape({-1, direction.size(-2), direction.size(-1)}), dtype, eps);
  return {direction.dim() == 2 ? x.squeeze(0) : x};
}

void Elementwise::multiply(const at::Tensor& x, const at::Tensor& factors) const {
  uses_pytorch("multiplies matrices by their scales");
  x.mul_(factors);
}

std::vector<const Elementwise*> elementwise_all(c10::Device device, at::ScalarType dtype) {
  std::vector<const Elementwise*> all{&default_elementwise(device, dtype)};
  if (all.front() == &cuda_elementwise()) {
    all.push_back(&aten_elementwise());
  } else if (!device.is_cpu() && half_of(dtype) && why_no_cuda_kernels(device).empty()) {
    all.push_back(&cuda_elementwise());
  }
  return all;
}

const Elementwise& default_elementwise(c10::Device device, at::ScalarType dtype) {
  return half_of(dtype) && prefers_cuda_kernels(device) ? cuda_elementwise()
                                                        : elementwise_of(device);
}

std::int64_t memo_words(c10::Device device) {
  std::int64_t most = 0;
  for (const Elementwise* one : elementwise_all(device, elementwise_of(device).default_dtype()))
    most = std::max(most, one->memo_words());
  return most;
}

const Elementwise& elementwise_of(c10::Device device) {
  return device.is_cpu() ? cpu_elementwise() : aten_elementwise();
}

}  // namespace dmuon::newton_schulz
