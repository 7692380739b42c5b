#include "dmuon/newton_schulz/products.h"

#include <cpuinfo.h>

#include "dmuon/core/error.h"
#include "dmuon/newton_schulz/cuda_kernels.h"
#include "dmuon/newton_schulz/products/cpu.h"
#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::newton_schulz {

bool is_floating(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

at::Tensor computed(const Products& products, const PendingProduct& pending, at::Tensor out) {
  const auto& [beta, c, alpha, a, b, factors, scales, scale] = pending;
  // Of an iteration without steps.
  if (beta == 1 && alpha == 0 && !out.defined() && !scales.defined()) return c;
  if (!out.defined()) out = scratch_tensor(c.sizes(), c.options());
  if (factors.defined()) {
    products.scaled_product(out, pending);
  } else {
    products.product(out, beta, c, alpha, a, b);
  }
  if (scales.defined()) {
    uses_pytorch("multiplies matrices by their scales");
    out.mul_(scales.mul(scale));
  }
  return out;
}

void Products::symmetric_product(const at::Tensor& out, double beta, const at::Tensor& c,
                                 double alpha, const at::Tensor& a, const at::Tensor& b,
                                 std::int64_t panel_rows) const {
  const std::int64_t m = out.size(-1);
  const std::int64_t panels = num_panels(m, panel_rows);
  if (panels == 1) {
    product(out, beta, c, alpha, a, b);
  } else {
    for (std::int64_t i = 0; i < panels; ++i) {
      const std::int64_t start = m * i / panels;
      const std::int64_t end = m * (i + 1) / panels;
      const auto panel = [&](const at::Tensor& x) {
        return x.narrow(-2, start, end - start).narrow(-1, 0, end);
      };
      const at::Tensor part = panel(out);
      product(part, beta, beta == 0 || c.is_same(out) ? part : panel(c), alpha,
              a.narrow(-2, start, end - start), b.narrow(-1, 0, end));
    }
  }
  mirror(out, panels);
}

bool Products::scaled_gram(const at::Tensor&, double, const at::Tensor&, const at::Tensor&) const {
  return false;
}

bool Products::has_wide_squares(at::ScalarType) const { return false; }

void Products::wide_gram(const WideSquare&, double, const at::Tensor&) const {
  core::bug("wide_gram: the backend has no wide squares");
}

void Products::wide_product(const WideSquare&, double, const WideSquare&, double, const WideSquare&,
                            const WideSquare&) const {
  core::bug("wide_product: the backend has no wide squares");
}

void Products::scaled_product(const at::Tensor&, const PendingProduct&) const {
  core::bug("scaled_product: the backend has no wide squares");
}

bool Products::add_to_weights(const at::Tensor&, const Scalar&, const Scalar&,
                              const PendingProduct&, const at::Tensor&) const {
  return false;
}

const Products& default_products(c10::Device device, at::ScalarType dtype) {
  if (!device.is_cpu()) return aten_products();
  // PyTorch's BLAS uses AMX, which multiplies bf16 faster than the kernels.
  const bool has_amx = dtype == at::kBFloat16 && cpuinfo_initialize() && cpuinfo_has_x86_amx_bf16();
  return kernels_multiply(dtype) && !has_amx ? avx512_products() : cpu_products();
}

std::vector<const Products*> products_of(c10::Device device, at::ScalarType dtype) {
  std::vector<const Products*> all{&default_products(device, dtype)};
  if (!device.is_cpu()) {
    if (half_of(dtype) && why_no_cuda_kernels(device).empty())
      all.insert(all.end(), {&cuda_products(), &cuda_full_products(), &cuda_fused_products()});
  } else if (kernels_multiply(dtype)) {
    all.push_back(all.front() == &cpu_products() ? &avx512_products() : &cpu_products());
  }
  return all;
}

}  // namespace dmuon::newton_schulz
