#include "dmuon/optim/step_scalars.h"

#include <ATen/ops/empty.h>

#include "dmuon/core/error.h"
#include "dmuon/newton_schulz/cuda_kernels.h"

namespace dmuon::optim {

std::size_t StepScalars::add(const std::vector<double>& numbers) {
  core::invariant(!on_device_.defined(), "StepScalars: numbers have been written already");
  const std::size_t place = numbers_.size();
  numbers_.insert(numbers_.end(), numbers.begin(), numbers.end());
  return place;
}

const float* StepScalars::on_device(std::size_t place, c10::Device device) {
  if (!on_device_.defined()) {
    on_device_ = at::empty({std::ssize(numbers_)}, at::TensorOptions(device).dtype(at::kFloat));
    newton_schulz::write_scalars(numbers_, on_device_);
  }
  return on_device_.const_data_ptr<float>() + place;
}

}  // namespace dmuon::optim
