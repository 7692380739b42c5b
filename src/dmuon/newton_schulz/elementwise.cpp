#include "dmuon/newton_schulz/elementwise.h"

namespace dmuon::newton_schulz {

Start Elementwise::start(const at::Tensor& momentum, const at::Tensor& gradient, double mu,
                         bool nesterov, const at::Tensor& applies, at::ScalarType dtype,
                         double eps) const {
  at::Tensor direction = move_momentum(momentum, gradient, mu, nesterov, applies);
  direction = direction.reshape({-1, direction.size(-2), direction.size(-1)});
  const at::Tensor x = normalise(direction, dtype, eps);
  return {momentum.dim() == 2 ? x.squeeze(0) : x};
}

const Elementwise& elementwise_of(c10::Device device) {
  return device.is_cpu() ? cpu_elementwise() : aten_elementwise();
}

}  // namespace dmuon::newton_schulz
