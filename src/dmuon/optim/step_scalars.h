#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

namespace dmuon::optim {

/// The numbers of one step that kernels read on the device (Rule::scalars), of all its updates:
///
///     StepScalars scalars;
///     const std::size_t place = scalars.add(rule.scalars(rows, cols, transposed));
///     piece.scalars = scalars.on_device(place, device);  // the first call writes all, one launch
///
/// All on_device() calls have one current stream. Not thread-safe.
class StepScalars {
 public:
  /// Call it before on_device().
  std::size_t add(const std::vector<double>& numbers);

  /// Returns the address on the device of what add() returned `place` for; valid as long as this.
  const float* on_device(std::size_t place, c10::Device device);

 private:
  std::vector<double> numbers_;
  at::Tensor on_device_;
};

}  // namespace dmuon::optim
