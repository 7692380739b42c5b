#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

// [b, 1, 1]: the largest entry of each matrix, or 1 if the matrix is zero.
Tensor largest_of(const Tensor& x) {
  const Tensor largest = at::linalg_vector_norm(x, std::numeric_limits<double>::infinity(),
                                                at::IntArrayRef{-2, -1}, /*keepdim=*/true);
  return largest.masked_fill(largest.eq(0), 1);
}

class AtenElementwise final : public Elementwise {
 public:
  std::string_view name() const override { return "aten"; }

  // fp16 has three more significand bits than bf16, and the iteration stays within its range.
  at::ScalarType default_dtype() const override { return at::kHalf; }

  // The norm is in fp64, because squares of the entries could leave their dtype's range. The kernel
  // converts while it reads, so x is read twice and nothing of its size is allocated but the
  // result.
  Tensor normalise(const Tensor& given, at::ScalarType dtype, double eps) const override {
    uses_pytorch("normalises directions");
    if (given.size(0) == 0) return given.to(dtype);
    // No dtype holds the squares of fp64: divide such matrices by their largest entries first.
    const bool wide = given.scalar_type() == at::kDouble;
    const Tensor largest = wide ? largest_of(given) : Tensor();
    const Tensor x = wide ? given.div(largest) : given;
    Tensor norm = at::stack(at::_foreach_norm(x.unbind(), 2, at::kDouble)).view({-1, 1, 1});
    if (wide) norm = at::maximum(norm, largest.reciprocal().mul_(eps));
    norm.clamp_min_(std::max(wide ? 0 : eps, std::numeric_limits<double>::min()));
    const std::int64_t rows = x.size(1);
    const std::int64_t cols = x.size(2);
    const std::vector<std::int64_t> sizes{x.size(0), aligned(rows, dtype), aligned(cols, dtype)};
    const auto options = x.options().dtype(dtype);
    const bool pads = sizes[1] != rows || sizes[2] != cols;
    const Tensor normalised = pads ? at::zeros(sizes, options) : at::empty(sizes, options);
    Tensor inside = normalised.narrow(1, 0, rows).narrow(2, 0, cols);
    at::div_out(inside, x, norm);
    return normalised;
  }

  Tensor move_momentum(const MomentumStep& step) const override {
    uses_pytorch("moves momenta");
    const auto& [momentum, gradient, scalar, nesterov, applies, memo, factor] = step;
    const double mu = scalar.value;
    // If the step does not apply, the momentum moves towards itself and stays finite.
    Tensor direction;
    if (factor.defined()) {
      direction = gradient.mul(factor);
      at::where_out(direction, applies, direction, momentum);
    } else {
      direction = at::where(applies, gradient, momentum);
    }
    momentum.lerp_(direction, 1 - mu);
    if (!nesterov) return momentum;
    return direction.lerp_(momentum, mu);
  }

  void move_weights(const WeightStep& step) const override {
    uses_pytorch("moves weights");
    const auto& [weights, decay, update, factor, applies, scales, scale] = step;
    const auto if_it_applies = [&applies = applies, &weights = weights](double value,
                                                                        double otherwise) {
      const auto scalar = [&](double x) { return at::scalar_tensor(x, weights.options()); };
      return at::where(applies, scalar(value), scalar(otherwise));
    };
    if (decay.value != 1) weights.mul_(if_it_applies(decay.value, 1));
    Tensor factors = if_it_applies(factor.value * scale, 0);
    if (scales.defined()) {
      auto sizes = weights.sizes().vec();
      sizes[sizes.size() - 1] = sizes[sizes.size() - 2] = 1;
      factors = factors.mul(scales.reshape(sizes));
    }
    weights.addcmul_(update, factors);
  }
};

}  // namespace

std::int64_t aligned(std::int64_t side, at::ScalarType dtype) {
  const std::int64_t entries = c10::elementSize(dtype) == 2 ? 8 : 1;
  return (side + entries - 1) / entries * entries;
}

const Elementwise& aten_elementwise() {
  static const AtenElementwise kElementwise;
  return kElementwise;
}

}  // namespace dmuon::newton_schulz
