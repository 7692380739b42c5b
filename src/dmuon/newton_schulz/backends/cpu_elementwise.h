#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dmuon::newton_schulz::cpu {

// What CPUs do element by element, in one pass over memory each, with the widest registers that the
// machine has; where tensors are given, on torch's threads. Bits depend on neither.

/// Backend::take_momentum with nesterov, where it applies: reads 8 bytes an element and writes 8.
at::Tensor take_momentum(const at::Tensor& momentum, const at::Tensor& gradient, double mu);

/// Backend::start where it applies, of one matrix: reads 8 bytes an element, writes 4 and the
/// direction, rounded once.
/// @param momentum, gradient  [rows, cols] fp32, entries of a row side by side.
/// @param direction           at least as large, contiguous: fp32 or bf16. What is beyond stays.
/// @return                    the sum of the direction's squares before it is rounded, in fp64.
double take_momentum(const at::Tensor& momentum, const at::Tensor& gradient, double mu,
                     bool nesterov, const at::Tensor& direction);

/// Backend::move_weights where it applies: reads 4 bytes an element and the direction, writes 4.
void move_weights(const at::Tensor& master, const at::Tensor& direction, double decay, double lr);

/// In fp64, in an order of additions that depends on the size alone.
double sum_of_squares(const float* x, std::int64_t size);

/// out <- scale * x, rounded once, of `out`'s dtype: fp32 or bf16.
void write_scaled(const float* x, std::int64_t size, double scale, float* out);
void write_scaled(const float* x, std::int64_t size, double scale, c10::BFloat16* out);

}  // namespace dmuon::newton_schulz::cpu
