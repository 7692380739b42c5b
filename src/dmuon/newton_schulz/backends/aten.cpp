#include <ATen/Context.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <limits>
#include <mutex>

#include "dmuon/newton_schulz/backend.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

// Before PyTorch 2.10 this option of cuBLAS' was a bool.
[[maybe_unused]] bool allows(bool option) { return option; }
template <typename Option>
bool allows(Option option) {
  return option == Option::AllowReducedPrecisionWithSplitK;
}

// While it lives cuBLAS adds the parts of a sum in fp32: by default it may split long ones and add
// the parts in 16 bits. The options are the process's, so one thread at a time multiplies.
class SumsInFp32 {
 public:
  SumsInFp32() {
    if (fp16_) at::globalContext().setAllowFP16ReductionCuBLAS(false);
    if (bf16_) at::globalContext().setAllowBF16ReductionCuBLAS(false);
  }
  ~SumsInFp32() {
    if (fp16_) at::globalContext().setAllowFP16ReductionCuBLAS(true);
    if (bf16_) at::globalContext().setAllowBF16ReductionCuBLAS(true);
  }
  SumsInFp32(const SumsInFp32&) = delete;
  SumsInFp32& operator=(const SumsInFp32&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }

  const std::scoped_lock<std::mutex> lock_{mutex()};
  bool fp16_ = allows(at::globalContext().allowFP16ReductionCuBLAS());
  bool bf16_ = allows(at::globalContext().allowBF16ReductionCuBLAS());
};

// [b, 1, 1] the largest entries, 1 of a zero matrix.
Tensor largest_of(const Tensor& x) {
  const Tensor largest = at::linalg_vector_norm(x, std::numeric_limits<double>::infinity(),
                                                at::IntArrayRef{-2, -1}, /*keepdim=*/true);
  return largest.masked_fill(largest.eq(0), 1);
}

// Time of an fp32 FLOP over a 16-bit one of tensor cores: 989 against 67 TFLOP/s on an H100.
constexpr double kFp32CostBesideTensorCores = 15;

// Of smaller results a panel would leave most of an accelerator idle.
constexpr std::int64_t kMinRowsOfPanels = 2048;

class AtenBackend final : public Backend {
 public:
  std::string_view name() const override { return "aten"; }

  // fp16 has three more significand bits than bf16, and the iteration never leaves its range.
  at::ScalarType default_dtype() const override { return at::kHalf; }

  // An R in fp16 meets fp16's error bounds on rectangular matrices. In bf16 it does not: singular
  // values of ill-conditioned ones come out as 1.4 instead of 1.12. At the cost of fp32 below
  // nearly all shapes take another form.
  at::ScalarType gram_dtype(at::ScalarType dtype) const override {
    return dtype == at::kBFloat16 ? at::kFloat : dtype;
  }

  // Panels of one result may each fill only a part of an accelerator, and a mirrored triangle has
  // each rounding error twice: the Gram form is off by 1.0 to 2.7 times as much (128 x 512 in fp16,
  // condition numbers 1 to 1e8). So products are full unless others were found faster, and exact.
  std::vector<std::int64_t> panel_rows(std::int64_t m, at::ScalarType) const override {
    if (m < kMinRowsOfPanels) return {0};
    return {0, (m + 1) / 2, (m + 3) / 4};
  }

  flops::SymmetricCost symmetric_cost(std::int64_t, at::ScalarType dtype) const override {
    return {.share = 1, .gram_dtype = dtype == at::kBFloat16 ? kFp32CostBesideTensorCores : 1};
  }

  bool batched(std::int64_t, at::ScalarType) const override { return true; }

  std::int64_t at_once(std::int64_t, std::int64_t, std::int64_t count,
                       at::ScalarType) const override {
    return count;
  }

  // The norm in fp64, because squares of the entries could leave their dtype's range, by a kernel
  // that converts while it reads: x is read twice, and nothing as large lies between it and the
  // result.
  Tensor normalise(const Tensor& given, at::ScalarType dtype, double eps) const override {
    if (given.size(0) == 0) return given.to(dtype);
    // Squares of fp64 no dtype holds: there matrices are divided by their largest entries first.
    const bool wide = given.scalar_type() == at::kDouble;
    const Tensor largest = wide ? largest_of(given) : Tensor();
    const Tensor x = wide ? given.div(largest) : given;
    Tensor norm = at::stack(at::_foreach_norm(x.unbind(), 2, at::kDouble)).view({-1, 1, 1});
    if (wide) norm = at::maximum(norm, largest.reciprocal().mul_(eps));
    norm.clamp_min_(std::max(wide ? 0 : eps, std::numeric_limits<double>::min()));
    Tensor normalised = at::empty(x.sizes(), x.options().dtype(dtype));
    at::div_out(normalised, x, norm);
    return normalised;
  }

  void product(const Tensor& out, double beta, const Tensor& c, double alpha, const Tensor& a,
               const Tensor& b) const override {
    // With out as its own addend ATen accumulates in place, whatever out's strides.
    if (beta != 0 && !out.is_same(c)) out.copy_(c);
    const SumsInFp32 guard;
    if (a.dim() == 2) {
      out.addmm_(a, b, beta, alpha);
    } else {
      out.baddbmm_(a, b, beta, alpha);
    }
  }

  Tensor take_momentum(const Update& update) const override {
    // In the direction of itself the momentum does not move, and what follows of it is finite.
    Tensor direction = at::where(update.applies, update.gradient, update.momentum);
    update.momentum.lerp_(direction, 1 - update.mu);
    if (!update.nesterov) return update.momentum;
    return direction.lerp_(update.momentum, update.mu);
  }

  void move_weights(const Update& update, const Tensor& direction) const override {
    const auto if_it_applies = [&](double value, double otherwise) {
      const auto scalar = [&](double x) { return at::scalar_tensor(x, update.master.options()); };
      return at::where(update.applies, scalar(value), scalar(otherwise));
    };
    if (update.decay != 1) update.master.mul_(if_it_applies(update.decay, 1));
    update.master.addcmul_(direction, if_it_applies(-update.lr, 0));
  }

 protected:
  void mirror(const Tensor& out, std::int64_t num_panels) const override {
    const std::int64_t m = out.size(-1);
    for (std::int64_t i = 1; i < num_panels; ++i) {
      const std::int64_t start = m * i / num_panels;
      const std::int64_t rows = m * (i + 1) / num_panels - start;
      const Tensor below = out.narrow(-2, start, rows).narrow(-1, 0, start);
      out.narrow(-2, 0, start).narrow(-1, start, rows).copy_(below.mT());
    }
  }
};

}  // namespace

const Backend& aten_backend() {
  static const AtenBackend kBackend;
  return kBackend;
}

}  // namespace dmuon::newton_schulz
