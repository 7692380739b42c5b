#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
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
  std::int64_t size() const { return std::ssize(numbers_); }

  /// Puts the numbers into this memory, [at least size()] fp32 on the device, instead of new
  /// memory. Call it before on_device().
  void put_in(at::Tensor memory) { memory_ = std::move(memory); }

  /// Returns the address on the device of what add() returned `place` for; valid as long as this.
  const float* on_device(std::size_t place, c10::Device device);

 private:
  std::vector<double> numbers_;
  at::Tensor memory_;
  bool is_written_ = false;
};

}  // namespace dmuon::optim
