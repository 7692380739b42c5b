#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dmuon::newton_schulz::cpu {

// Loops of cpu_elementwise(): one pass over memory each, with the widest registers of the machine.
// Functions that take tensors use torch's threads. Bits depend on neither.

/// Elementwise::move_momentum with nesterov. Reads 8 bytes an element and writes 8.
at::Tensor move_momentum(const at::Tensor& momentum, const at::Tensor& gradient,
                         float gradient_factor, double mu);

/// The same for one matrix and either direction, which is rounded once. Reads 8 bytes an element;
/// writes 4 and the direction.
/// @param momentum, gradient  [rows, cols] fp32; entries of a row lie side by side.
/// @param direction           at least as large, contiguous, fp32 or bf16. Its padding is kept.
/// @return                    the sum of squares of the unrounded direction, in fp64.
double move_momentum(const at::Tensor& momentum, const at::Tensor& gradient, float gradient_factor,
                     double mu, bool nesterov, const at::Tensor& direction);

/// Elementwise::move_weights. Reads 4 bytes an element and the update, writes 4.
void move_weights(const at::Tensor& weights, double decay, const at::Tensor& update, double factor);

/// Adds in fp64, in an order that depends on the size alone.
double sum_of_squares(const float* x, std::int64_t size);

/// out <- scale * x, rounded once to out's dtype: fp32 or bf16.
void write_scaled(const float* x, std::int64_t size, double scale, float* out);
void write_scaled(const float* x, std::int64_t size, double scale, c10::BFloat16* out);

}  // namespace dmuon::newton_schulz::cpu
