#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/elementwise.h"
#include "dmuon/kernels/cuda/library.h"
#include "dmuon/newton_schulz/elementwise.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;
namespace gpu = kernels::cuda;

constexpr bool kShowsStreams = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11;

// The cudaStream_t, without a CUDA header or library.
void* current_stream(c10::Device device) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamNativeHandle(guard.getStream(device));
#else
  core::bug("this PyTorch does not show the stream of ", device);
#endif
}

// The matrices of [..., rows, cols], of up to four dimensions: `outer` times `inner`.
struct Batch {
  explicit Batch(const Tensor& x)
      : outer(x.dim() < 3 ? 1 : x.size(0)),
        inner(x.dim() < 4 ? 1 : x.size(1)),
        outer_stride(x.dim() < 3 ? 0 : x.stride(0)),
        inner_stride(x.dim() < 4 ? 0 : x.stride(1)) {}
  std::int64_t size() const { return outer * inner; }

  std::int64_t outer, inner, outer_stride, inner_stride;
};

constexpr std::int64_t kMaxBatch = 65535;
constexpr std::int64_t kMaxEntries = 1LL << 30;  // of a matrix with its padding

bool fits(const Tensor& x) {
  const std::int64_t padded = aligned(x.size(-2), at::kHalf) * aligned(x.size(-1), at::kHalf);
  return x.dim() <= 4 && x.stride(-1) == 1 && Batch(x).size() <= kMaxBatch && padded <= kMaxEntries;
}

std::optional<gpu::Half> half_of(at::ScalarType dtype) {
  if (dtype == at::kHalf) return gpu::Half::kFp16;
  if (dtype == at::kBFloat16) return gpu::Half::kBFloat16;
  return std::nullopt;
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
    const Batch batch(momentum);
    const std::int64_t size = batch.size();
    const std::int64_t rows = momentum.size(-2);
    const std::int64_t cols = momentum.size(-1);
    const Tensor x = at::empty({size, aligned(rows, dtype), aligned(cols, dtype)},
                               momentum.options().dtype(dtype));
    Tensor factor = given_factor;
    if (factor.defined()) factor = factor.to(at::kFloat);
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
                               .mu = mu,
                               .nesterov = nesterov,
                               .eps = eps,
                               .applies = byte(applies)};
    if (factor.defined()) direction.gradient_factor = factor.const_data_ptr<float>();
    const Tensor partial = at::empty({gpu::partial_words(direction)}, momentum.options());
    direction.partial = partial.data_ptr<float>();
    gpu::direction(direction, momentum.device().index(), current_stream(momentum.device()));
    const Tensor scales = memo.narrow(1, gpu::kMemoInverse, 1).unsqueeze(2);
    if (momentum.dim() == 2) return {x.squeeze(0), 1, scales.squeeze(0)};
    return {x, 1, scales};
  }

  void move_weights(const Tensor& weights, double decay, const Tensor& update, double factor,
                    const Tensor& applies) const override {
    const auto format = half_of(update.scalar_type());
    if (!format || !fits(weights) || !fits(update)) {
      return aten_elementwise().move_weights(weights, decay, update, factor, applies);
    }
    const Batch batch(weights);
    const Batch updates(update);
    const auto* u = static_cast<const std::uint16_t*>(update.const_data_ptr());
    for (std::int64_t i = 0; i < batch.inner; ++i) {
      gpu::move_weights({.batch = batch.outer,
                         .rows = weights.size(-2),
                         .cols = weights.size(-1),
                         .w = weights.data_ptr<float>() + i * batch.inner_stride,
                         .w_row_stride = weights.stride(-2),
                         .w_batch_stride = batch.outer_stride,
                         .u = u + i * updates.inner_stride,
                         .u_format = *format,
                         .u_row_stride = update.stride(-2),
                         .u_batch_stride = updates.outer_stride,
                         .decay = static_cast<float>(decay),
                         .factor = static_cast<float>(factor),
                         .applies = byte(applies)},
                        weights.device().index(), current_stream(weights.device()));
    }
  }
};

// Blocks of columns of two matrices with odd sides, [2, 2, 23, 37] fp32, entries of about 1.
Tensor numbers(c10::Device device, double step) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  return at::arange(2 * 23 * 74, options).mul_(step).sin_().view({2, 23, 2, 37}).transpose(1, 2);
}

bool near(const Tensor& one, const Tensor& other, double tolerance) {
  return one.to(at::kFloat).sub(other).norm().item().toDouble() <=
         tolerance * other.norm().item().toDouble();
}

// Three steps beside ATen's, on this device: by a wrong guess of the scale, a right one, and one
// step that does not apply.
bool passes_self_test(c10::Device device, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const Tensor momentum = numbers(device, 0.7);
  const Tensor weights = numbers(device, 1.1);
  const Tensor same_momentum = momentum.clone();
  const Tensor same_weights = weights.clone();
  const Tensor memo = at::zeros({4, 1, cuda_elementwise().memo_words()}, momentum.options());
  const Tensor factor = at::full({}, 0.75, momentum.options());
  const double unit = dtype == at::kHalf ? 1e-3 : 8e-3;
  for (const auto& [step, does_apply] : {std::pair{1.3, true}, {1.9, true}, {2.3, false}}) {
    const Tensor gradient = numbers(device, step);
    const Tensor applies = at::full({}, does_apply, momentum.options().dtype(at::kBool));
    const Start start = cuda_elementwise().start(
        {momentum, gradient, 0.95, true, applies, memo, factor}, dtype, 1e-7);
    const Start same = aten_elementwise().start(
        {same_momentum, gradient, 0.95, true, applies, {}, factor}, dtype, 1e-7);
    if (!near(start.x.mul(start.scales), same.x.to(at::kFloat), unit)) return false;
    const Tensor update = same.x.narrow(1, 0, 23).narrow(2, 0, 37).view({2, 2, 23, 37});
    cuda_elementwise().move_weights(weights, 0.9, update, -0.1, applies);
    aten_elementwise().move_weights(same_weights, 0.9, update, -0.1, applies);
  }
  return near(momentum, same_momentum, 1e-6) && near(weights, same_weights, 1e-6);
}

// The second is of tests: a device of the same streams, with a driver that emulates kernels.
bool runs_cuda(c10::Device device) {
  return device.is_cuda() ||
         (device.is_privateuseone() && std::getenv("DMUON_TEST_KERNELS") != nullptr);
}

// "cuda" is the current device.
c10::Device with_index(c10::Device device) {
  if (device.has_index() || !c10::impl::hasDeviceGuardImpl(device.type())) return device;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.deviceCount() == 0 ? device : guard.getDevice();
}

std::string why_not_by_machine(c10::Device device) {
  if (!runs_cuda(device)) return core::message("dmuon's kernels are for CUDA, not for ", device);
  if (!kShowsStreams) return "dmuon's kernels need PyTorch 2.11 or newer";
  return gpu::unavailable(device.index());
}

std::string why_not_by_test(c10::Device device) {
  std::string reason = "results differ from PyTorch's";
  try {
    if (passes_self_test(device, at::kHalf) && passes_self_test(device, at::kBFloat16)) return "";
  } catch (const std::exception& error) {
    reason = error.what();
  }
  return core::message("dmuon's kernels failed their test on ", device, ": ", reason);
}

}  // namespace

const Elementwise& cuda_elementwise() {
  static const CudaElementwise kElementwise;
  return kElementwise;
}

std::string why_no_cuda_elementwise(c10::Device given) {
  const c10::Device device = with_index(given);
  static std::mutex mutex;
  static std::map<std::string, std::string> known;  // by device
  {
    const std::scoped_lock lock(mutex);
    const auto found = known.find(device.str());
    if (found != known.end()) return found->second;
  }
  // Without the lock: PyTorch may take the GIL here.
  std::string reason = why_not_by_machine(device);
  const bool is_tested = reason.empty();
  if (is_tested) reason = why_not_by_test(device);
  std::unique_lock lock(mutex);
  const bool is_first = known.emplace(device.str(), reason).second;
  lock.unlock();
  if (is_first && is_tested && !reason.empty()) {
    TORCH_WARN("dmuon: ", reason, "; PyTorch's operators take their place");
  }
  return reason;
}

}  // namespace dmuon::newton_schulz
