#include "dmuon/engine/owned_batch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <utility>

namespace dmuon::engine {

OwnedBatch::OwnedBatch(std::vector<int> matrices_, std::int64_t rows, std::int64_t cols,
                       c10::Device device)
    : matrices(std::move(matrices_)), filled(matrices.size(), false) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  const auto batch = static_cast<std::int64_t>(matrices.size());
  master = at::empty({batch, rows, cols}, options);
  gradient = at::empty({batch, rows, cols}, options);
}

void OwnedBatch::accumulate(std::size_t place, std::int64_t begin, const at::Tensor& values,
                            double scale) {
  at::Tensor target =
      gradient[static_cast<std::int64_t>(place)].view({-1}).narrow(0, begin, values.numel());
  if (filled[place]) {
    target.add_(values, scale);
  } else if (values.scalar_type() == at::kFloat) {
    at::mul_out(target, values, at::scalar_tensor(scale, at::TensorOptions().dtype(at::kDouble)));
  } else {
    target.copy_(values);
    target.mul_(scale);
  }
}

std::vector<double> OwnedBatch::squared_norms() const {
  // fp64 throughout: squares of gradients as small as 1e-30 or as large as 1e30 leave fp32's range.
  const at::Tensor norms =
      at::linalg_vector_norm(gradient, 2, at::IntArrayRef{1, 2}, /*keepdim=*/false, at::kDouble)
          .cpu();
  const auto* data = norms.const_data_ptr<double>();
  std::vector<double> squared(matrices.size(), 0.0);
  for (std::size_t i = 0; i < squared.size(); ++i) {
    if (filled[i]) squared[i] = data[i] * data[i];
  }
  return squared;
}

std::int64_t OwnedBatch::num_bytes() const {
  return static_cast<std::int64_t>(master.nbytes() + gradient.nbytes());
}

}  // namespace dmuon::engine
