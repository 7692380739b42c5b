#include "dmuon/newton_schulz/elementwise.h"

#include <algorithm>

#include "dmuon/newton_schulz/cuda_kernels.h"

namespace dmuon::newton_schulz {

Start Elementwise::start(const MomentumStep& step, at::ScalarType dtype, double eps) const {
  at::Tensor direction = move_momentum(step);
  direction = direction.reshape({-1, direction.size(-2), direction.size(-1)});
  const at::Tensor x = normalise(direction, dtype, eps);
  return {step.momentum.dim() == 2 ? x.squeeze(0) : x};
}

void Elementwise::multiply(const at::Tensor& x, const at::Tensor& factors) const {
  x.mul_(factors);
}

std::vector<const Elementwise*> elementwise_all(c10::Device device, at::ScalarType dtype) {
  if (device.is_cpu() || !half_of(dtype)) return {&elementwise_of(device)};
  if (prefers_cuda_kernels(device)) return {&cuda_elementwise(), &aten_elementwise()};
  if (why_no_cuda_kernels(device).empty()) return {&aten_elementwise(), &cuda_elementwise()};
  return {&aten_elementwise()};
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
