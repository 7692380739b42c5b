#include <ATen/ops/zeros.h>

#include <algorithm>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/elementwise.h"
#include "dmuon/kernels/cuda/library.h"
#include "dmuon/newton_schulz/cuda_kernels.h"
#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;
namespace gpu = kernels::cuda;

constexpr std::int64_t kMaxEntries = 1LL << 30;  // of a matrix with its padding

bool fits(const Tensor& x) {
  const std::int64_t padded = aligned(x.size(-2), at::kHalf) * aligned(x.size(-1), at::kHalf);
  return x.dim() <= 4 && x.stride(-1) == 1 && MatricesOf(x).size() <= gpu::kMaxBatch &&
         padded <= kMaxEntries;
}

const std::uint8_t* byte(const Tensor& applies) {
  return static_cast<const std::uint8_t*>(applies.const_data_ptr());
}

// kernels/cuda where they serve, else ATen's operators.
class CudaElementwise final : public Elementwise {
 public:
  std::string_view name() const override { return "cuda"; }
  at::ScalarType default_dtype() const override { return aten_elementwise().default_dtype(); }
  std::int64_t memo_words() const override { return gpu::kMemoWords; }

  Tensor normalise(const Tensor& x, at::ScalarType dtype, double eps) const override {
    return aten_elementwise().normalise(x, dtype, eps);
  }
  Tensor move_momentum(const MomentumStep& step) const override {
    return aten_elementwise().move_momentum(step);
  }

  Start start(const MomentumStep& step, at::ScalarType dtype, double eps) const override {
    const auto& [momentum, gradient, mu, nesterov, applies, given, given_factor] = step;
    const auto format = half_of(dtype);
    if (!format || !fits(momentum) || momentum.numel() == 0 ||
        momentum.strides() != gradient.strides()) {
      return aten_elementwise().start(step, dtype, eps);
    }
    const MatricesOf batch(momentum);
    const std::int64_t size = batch.size();
    const std::int64_t rows = momentum.size(-2);
    const std::int64_t cols = momentum.size(-1);
    const Tensor x = scratch_tensor({size, aligned(rows, dtype), aligned(cols, dtype)},
                                    momentum.options().dtype(dtype));
    Tensor factor = given_factor;
    if (factor.defined()) factor = factor.to(at::kFloat);
    if (!given.defined()) uses_pytorch("clears a memo");
    const Tensor memo = given.defined() ? given.view({size, memo_words()})
                                        : at::zeros({size, memo_words()}, momentum.options());
    core::invariant(memo.is_contiguous(), "the memo of ", size, " matrices is not contiguous");
    gpu::DirectionOf direction{.batch = size,
                               .rows = rows,
                               .cols = cols,
                               .gradient = gradient.const_data_ptr<float>(),
                               .momentum = momentum.data_ptr<float>(),
                               .row_stride = momentum.stride(-2),
                               .inner_batch = batch.inner,
                               .inner_stride = batch.inner_stride,
                               .batch_stride = batch.outer_stride,
                               .x = x.mutable_data_ptr(),
                               .x_format = *format,
                               .x_rows = x.size(1),
                               .x_cols = x.size(2),
                               .memo = memo.data_ptr<float>(),
                               .nesterov = nesterov,
                               .eps = eps,
                               .applies = byte(applies)};
    if (factor.defined()) direction.gradient_factor = factor.const_data_ptr<float>();
    const ScalarsOnDevice rest({{1 - mu.value, mu.on_device}}, momentum);
    direction.rest = rest[0];
    const Tensor squares = scratch_tensor({size, 1, 1}, momentum.options());
    direction.squares = squares.data_ptr<float>();
    const Tensor partial = scratch_tensor({gpu::partial_words(direction)}, momentum.options());
    direction.partial = partial.data_ptr<float>();
    gpu::direction(direction, momentum.device().index(), current_stream(momentum.device()));
    const Tensor scales = memo.narrow(1, gpu::kMemoInverse, 1).unsqueeze(2);
    if (momentum.dim() == 2) return {x.squeeze(0), 1, scales.squeeze(0), this, squares.squeeze(0)};
    return {x, 1, scales, this, squares};
  }

  void multiply(const Tensor& x, const Tensor& factors) const override {
    const std::int64_t batch = factors.numel();
    gpu::multiply({.batch = batch,
                   .entries = x.numel() / batch,
                   .x = x.mutable_data_ptr(),
                   .format = *half_of(x.scalar_type()),
                   .factors = factors.const_data_ptr<float>(),
                   .factor_stride = factors.stride(0)},
                  x.device().index(), current_stream(x.device()));
  }

  bool reads_scalars() const override { return true; }

  void move_weights(const WeightStep& step) const override {
    const auto& [weights, decay, update, factor, applies, scales, scale] = step;
    const auto format = half_of(update.scalar_type());
    if (!format || !fits(weights) || !fits(update)) return aten_elementwise().move_weights(step);
    if (weights.numel() == 0) return;
    const MatricesOf batch(weights);
    const MatricesOf updates(update);
    const ScalarsOnDevice scalars({decay, factor}, weights);
    gpu::MoveWeights move{.batch = batch.size(),
                          .rows = weights.size(-2),
                          .cols = weights.size(-1),
                          .w = weights.data_ptr<float>(),
                          .w_row_stride = weights.stride(-2),
                          .inner_batch = batch.inner,
                          .w_inner_stride = batch.inner_stride,
                          .w_batch_stride = batch.outer_stride,
                          .u = update.const_data_ptr(),
                          .u_format = *format,
                          .u_row_stride = update.stride(-2),
                          .u_inner_stride = updates.inner_stride,
                          .u_batch_stride = updates.outer_stride,
                          .decay = scalars[0],
                          .factor = scalars[1],
                          .scale = static_cast<float>(scale),
                          .applies = byte(applies)};
    if (scales.defined()) {
      move.scales = scales.const_data_ptr<float>();
      move.scale_stride = scales.stride(0);
    }
    gpu::move_weights(move, weights.device().index(), current_stream(weights.device()));
  }
};

}  // namespace

const Elementwise& cuda_elementwise() {
  static const CudaElementwise kElementwise;
  return kElementwise;
}

}  // namespace dmuon::newton_schulz
