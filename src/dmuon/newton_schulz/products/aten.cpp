#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>

#include <mutex>
#include <optional>

#include "dmuon/newton_schulz/products.h"
#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

// Before PyTorch 2.10 this option of cuBLAS was a bool.
[[maybe_unused]] bool allows(bool option) { return option; }
template <typename Option>
bool allows(Option option) {
  return option == Option::AllowReducedPrecisionWithSplitK;
}

// While an object lives, cuBLAS adds up in fp32. Otherwise it may split long sums and add the parts
// in 16 bits, or, if the user has allowed that, add everything in fp16. The options belong to the
// process, so one thread multiplies at a time.
class SumsInFp32 {
 public:
  SumsInFp32() {
    if (fp16_) at::globalContext().setAllowFP16ReductionCuBLAS(false);
    if (bf16_) at::globalContext().setAllowBF16ReductionCuBLAS(false);
    if (accumulates_) at::globalContext().setAllowFP16AccumulationCuBLAS(false);
  }
  ~SumsInFp32() {
    if (fp16_) at::globalContext().setAllowFP16ReductionCuBLAS(true);
    if (bf16_) at::globalContext().setAllowBF16ReductionCuBLAS(true);
    if (accumulates_) at::globalContext().setAllowFP16AccumulationCuBLAS(true);
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
  bool accumulates_ = at::globalContext().allowFP16AccumulationCuBLAS();
};

// Time of an fp32 FLOP over a 16-bit one of tensor cores: 989 against 67 TFLOP/s on an H100.
constexpr double kFp32CostBesideTensorCores = 15;

// Panels of smaller results would leave most of an accelerator idle.
constexpr std::int64_t kMinRowsOfPanels = 2048;

class AtenProducts final : public Products {
 public:
  std::string_view name() const override { return "aten"; }

  // On rectangular matrices an R in fp16 meets fp16's error bounds. An R in bf16 does not: singular
  // values of ill-conditioned matrices become 1.4 instead of 1.12. So it is in fp32. At that cost
  // (kFp32CostBesideTensorCores) nearly all shapes take another form.
  at::ScalarType gram_dtype(at::ScalarType dtype) const override {
    return dtype == at::kBFloat16 ? at::kFloat : dtype;
  }

  // Products are full unless `dmuon tune` finds panels that are faster and accurate enough. A panel
  // may fill only a part of an accelerator. A mirrored triangle has each rounding error twice: the
  // Gram form's error grows 1.0 to 2.7 times (128 x 512 in fp16, condition numbers 1 to 1e8).
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

  void product(const Tensor& out, double beta, const Tensor& c, double alpha, const Tensor& a,
               const Tensor& b) const override {
    uses_pytorch("multiplies matrices");
    // With out as its own addend ATen accumulates in place, whatever out's strides.
    if (beta != 0 && !out.is_same(c)) out.copy_(c);
    // On a CPU the options mean nothing, and code that torch.compile compiles meanwhile in another
    // thread depends on them.
    std::optional<SumsInFp32> guard;
    if (!out.is_cpu()) guard.emplace();
    if (a.dim() == 2) {
      out.addmm_(a, b, beta, alpha);
    } else {
      out.baddbmm_(a, b, beta, alpha);
    }
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

const Products& aten_products() {
  static const AtenProducts kProducts;
  return kProducts;
}

}  // namespace dmuon::newton_schulz
