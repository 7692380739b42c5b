#include "dmuon/newton_schulz/cuda_kernels.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/elementwise.h"
#include "dmuon/kernels/cuda/library.h"
#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/newton_schulz/products.h"
#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

constexpr bool kShowsStreams = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11;

// Blocks of columns of two matrices with odd sides, [2, 2, 23, 37] fp32, entries of about 1.
Tensor numbers(c10::Device device, double step) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  return at::arange(2 * 23 * 74, options).mul_(step).sin_().view({2, 23, 2, 37}).transpose(1, 2);
}

bool near(const Tensor& one, const Tensor& other, double tolerance) {
  return one.to(at::kFloat).sub(other).norm().item().toDouble() <=
         tolerance * other.norm().item().toDouble();
}

// Three updates beside ATen's, on this device: by a wrong guess of the scale, a right one, and one
// step that does not apply.
bool elementwise_passes(c10::Device device, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const Tensor momentum = numbers(device, 0.7);
  const Tensor weights = numbers(device, 1.1);
  const Tensor same_momentum = momentum.clone();
  const Tensor same_weights = weights.clone();
  const Tensor memo = at::zeros({4, 1, cuda_elementwise().memo_words()}, momentum.options());
  const Tensor factor = at::full({}, 0.75, momentum.options());
  const Tensor scales = at::arange(1, 5, momentum.options()).view({4, 1, 1});
  const double unit = dtype == at::kHalf ? 1e-3 : 8e-3;
  for (const auto& [step, does_apply] : {std::pair{1.3, true}, {1.9, true}, {2.3, false}}) {
    const Tensor gradient = numbers(device, step);
    const Tensor applies = at::full({}, does_apply, momentum.options().dtype(at::kBool));
    const Start start = cuda_elementwise().start(
        {momentum, gradient, 0.95, true, applies, memo, factor}, dtype, 1e-7);
    const Start same = aten_elementwise().start(
        {same_momentum, gradient, 0.95, true, applies, {}, factor}, dtype, 1e-7);
    cuda_elementwise().multiply(start.x, start.scales);
    if (!near(start.x, same.x.to(at::kFloat), unit)) return false;
    const Tensor update = same.x.narrow(1, 0, 23).narrow(2, 0, 37).view({2, 2, 23, 37});
    cuda_elementwise().move_weights({weights, 0.9, update, -0.1, applies, scales});
    aten_elementwise().move_weights({same_weights, 0.9, update, -0.1, applies, scales});
  }
  return near(momentum, same_momentum, 1e-6) && near(weights, same_weights, 1e-6);
}

// X, R = X X', Z = b R + c R R and a X + Z X by ATen, of two matrices with the short side first.
struct Step {
  explicit Step(const Tensor& upright)
      : x(upright),
        r(at::empty({2, x.size(1), x.size(1)}, x.options())),
        z(at::empty_like(r)),
        next(at::empty_like(x)) {
    aten_products().symmetric_product(r, 0, r, 0.01, x, x.mT(), 0);
    aten_products().symmetric_product(z, -1.5, r, 0.5, r, r, 0);
    aten_products().product(next, 2, x, 0.1, z, x);
  }

  Tensor x, r, z, next;
};

// Which products of the steps a choice has computed.
struct Tested {
  bool symmetric = false;
  bool full = false;
};

// Beside a step by ATen. For a tall matrix the last product is X Z.
bool product_passes(const kernels::cuda::ProductChoice& choice, const Step& step, double unit,
                    Tested* tested) {
  const auto& [x, r, z, next] = step;
  const Tensor ours = at::empty_like(r);
  const Tensor product = at::empty_like(r);
  if (product_by(choice, true, ours, 0, r, 0.01, x, x.mT())) {
    tested->symmetric = product_by(choice, true, product, -1.5, ours, 0.5, ours, ours);
    if (!near(product, z.to(at::kFloat), 4 * unit) || !at::equal(product, product.mT()))
      return false;
  }
  const bool tall = x.stride(-1) != 1;
  const Tensor lying = tall ? x.mT() : x;
  const Tensor moved = at::empty_like(lying);
  const bool computes = tall ? product_by(choice, false, moved, 2, lying, 0.1, lying, z.mT())
                             : product_by(choice, false, moved, 2, lying, 0.1, z, lying);
  tested->full |= computes;
  return !computes || near(tall ? moved.mT() : moved, next.to(at::kFloat), 2 * unit);
}

bool products_pass(c10::Device device, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  // Sides of multiples of 8, as the kernels read them, and of two tiles of the largest kind.
  // Squares give it a high rank: then each entry of the products depends on its own place.
  const Tensor places = at::arange(2 * 264 * 272, options.dtype(at::kLong));
  const Tensor angles = places.mul(places).remainder_(9973).to(at::kFloat).mul_(0.7);
  const Tensor x = angles.sin().view({2, 264, 272}).to(dtype);
  const double unit = dtype == at::kHalf ? 1e-3 : 8e-3;
  std::vector<kernels::cuda::ProductChoice> choices{
      {"product80_64", 1}, {"product80_64", 2}, {"product80_128", 1}, {"product80_128", 2}};
  if (kernels::cuda::has_product90(device.index()))
    choices.insert(choices.end(), {{"product90", 1}, {"product90", 2}});
  const std::vector<Step> steps{Step(x), Step(x.mT())};  // X' X has transposed operands
  return std::ranges::all_of(choices, [&](const auto& choice) {
    Tested tested;
    for (const Step& step : steps)
      if (!product_passes(choice, step, unit, &tested)) return false;
    const bool has_full = kernels::cuda::computes(choice, {.symmetric = false, .inner = 8});
    core::require(tested.symmetric && tested.full == has_full, "some of ", choice.kernel,
                  " was not tested");
    return true;
  });
}

// The last product that moves weights beside the same one and a move, by a bit.
bool fused_passes(c10::Device device, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const Tensor weights = numbers(device, 1.3);
  const Tensor same = weights.clone();
  const auto of = [&](double step) {
    const auto options = weights.options();
    return at::arange(4 * 24 * 40, options).mul_(step).sin_().view({4, 24, 40}).to(dtype);
  };
  const Tensor x = of(0.7);
  const Tensor q = of(1.1).matmul(x.mT());
  const Tensor scales = at::arange(1, 5, weights.options()).view({4, 1, 1});
  const Tensor applies = at::full({}, true, weights.options().dtype(at::kBool));
  const PendingProduct product{2, x, 0.1, q, x, {}, scales, 0.5};
  if (!cuda_fused_products().add_to_weights(weights, 0.9, -0.1, product, applies)) return false;
  const Tensor u = computed(cuda_full_products(), {2, x, 0.1, q, x});
  const Tensor update = u.narrow(1, 0, 23).narrow(2, 0, 37).view({2, 2, 23, 37});
  cuda_elementwise().move_weights({same, 0.9, update, -0.05, applies, scales});
  return at::equal(weights, same);
}

bool passes(c10::Device device, at::ScalarType dtype) {
  return elementwise_passes(device, dtype) && products_pass(device, dtype) &&
         fused_passes(device, dtype);
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
  return kernels::cuda::unavailable(device.index());
}

// What why_no_cuda_kernels has found.
struct Reasons {
  std::mutex mutex;
  std::unordered_map<c10::Device, std::string> by_device;
};
Reasons& reasons() {
  static Reasons all;
  return all;
}

std::optional<std::string> known_reason(c10::Device device) {
  const std::scoped_lock lock(reasons().mutex);
  const auto found = reasons().by_device.find(device);
  if (found == reasons().by_device.end()) return std::nullopt;
  return found->second;
}

std::string why_not_by_test(c10::Device device) {
  std::string reason = "results differ from PyTorch's";
  try {
    if (passes(device, at::kHalf) && passes(device, at::kBFloat16)) return "";
  } catch (const std::exception& error) {
    reason = error.what();
    reason = reason.substr(0, reason.find('\n'));  // PyTorch appends a backtrace
  }
  return core::message("dmuon's kernels failed their test on ", device, ": ", reason);
}

}  // namespace

void* current_stream(c10::Device device) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamNativeHandle(guard.getStream(device));
#else
  core::bug("this PyTorch does not show the stream of ", device);
#endif
}

at::Tensor kept_zeros(std::int64_t count, const at::TensorOptions& options, void* stream) {
  constexpr std::uint64_t kLeast = 1024;
  static std::mutex mutex;
  // Not freed when more are needed, because another thread may be about to use them; nor at the
  // process's end, when the device may be gone.
  static auto& kept = *new std::map<std::pair<c10::DeviceIndex, void*>, std::vector<Tensor>>();
  const std::scoped_lock lock(mutex);
  std::vector<Tensor>& of_stream = kept[{options.device().index(), stream}];
  if (of_stream.empty() || of_stream.back().numel() < count) {
    const std::uint64_t enough = std::bit_ceil(std::max(kLeast, static_cast<std::uint64_t>(count)));
    of_stream.push_back(at::zeros({static_cast<std::int64_t>(enough)}, options));
  }
  return of_stream.back();
}

void write_scalars(std::span<const double> numbers, const at::Tensor& out) {
  std::vector<float> rounded;
  for (const double number : numbers) rounded.push_back(static_cast<float>(number));
  kernels::cuda::write_scalars(rounded, out.mutable_data_ptr<float>(), out.device().index(),
                               current_stream(out.device()));
}

ScalarsOnDevice::ScalarsOnDevice(std::initializer_list<Scalar> scalars, const Tensor& like) {
  for (const Scalar& one : scalars) addresses_.push_back(one.on_device);
  if (std::ranges::find(addresses_, nullptr) == addresses_.end()) return;
  std::vector<double> values;
  for (const Scalar& one : scalars) values.push_back(one.value);
  own_ = scratch_tensor({std::ssize(values)}, like.options());
  write_scalars(values, own_);
  for (std::size_t i = 0; i < values.size(); ++i) addresses_[i] = own_.const_data_ptr<float>() + i;
}

std::optional<kernels::cuda::Half> half_of(at::ScalarType dtype) {
  if (dtype == at::kHalf) return kernels::cuda::Half::kFp16;
  if (dtype == at::kBFloat16) return kernels::cuda::Half::kBFloat16;
  return std::nullopt;
}

std::string why_no_cuda_kernels(c10::Device given) {
  const c10::Device device = with_index(given);
  if (const std::optional<std::string> known = known_reason(device)) return *known;
  // Without the lock: PyTorch may take the GIL here.
  std::string reason = why_not_by_machine(device);
  const bool is_tested = reason.empty();
  if (is_tested) reason = why_not_by_test(device);
  std::unique_lock lock(reasons().mutex);
  const bool is_first = reasons().by_device.emplace(device, reason).second;
  lock.unlock();
  if (is_first && is_tested && !reason.empty()) {
    TORCH_WARN("dmuon: ", reason, "; PyTorch's operators take their place");
  }
  return reason;
}

bool prefers_cuda_kernels(c10::Device given) {
  // No kernel runs on other devices, and none is loaded there.
  if (!kShowsStreams || !runs_cuda(given)) return false;
  const c10::Device device = with_index(given);
  if (!kernels::cuda::has_product90(device.index())) return false;
  const bool would_test = !known_reason(device);
  if (would_test && kernels::cuda::is_captured(current_stream(device))) return false;
  return why_no_cuda_kernels(device).empty();
}

}  // namespace dmuon::newton_schulz
