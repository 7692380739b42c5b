#include "dmuon/optim/step_scalars.h"

#include <ATen/ops/empty.h>

#include "dmuon/core/error.h"
#include "dmuon/newton_schulz/cuda_kernels.h"

namespace dmuon::optim {

std::size_t StepScalars::add(const std::vector<double>& numbers) {
  core::invariant(!is_written_, "StepScalars: numbers have been written already");
  const std::size_t place = numbers_.size();
  numbers_.insert(numbers_.end(), numbers.begin(), numbers.end());
  return place;
}

const float* StepScalars::on_device(std::size_t place, c10::Device device) {
  if (!memory_.defined())
    memory_ = at::empty({size()}, at::TensorOptions(device).dtype(at::kFloat));
  if (!std::exchange(is_written_, true)) newton_schulz::write_scalars(numbers_, memory_);
  return memory_.const_data_ptr<float>() + place;
}

}  // namespace dmuon::optim
