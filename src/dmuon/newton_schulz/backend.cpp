#include "dmuon/newton_schulz/backend.h"

#include <ATen/ops/empty_like.h>
#include <cpuinfo.h>

#include "dmuon/core/error.h"
#include "dmuon/newton_schulz/backends/cpu.h"

namespace dmuon::newton_schulz {

at::Tensor computed(const Backend& backend, const PendingProduct& product) {
  const auto& [beta, c, alpha, a, b, spare, factors] = product;
  const at::Tensor out = spare.defined() ? spare : at::empty_like(c);
  if (factors.defined()) {
    backend.scaled_product(out, product);
  } else {
    backend.product(out, beta, c, alpha, a, b);
  }
  return out;
}

void Backend::symmetric_product(const at::Tensor& out, double beta, const at::Tensor& c,
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

bool Backend::has_wide_squares(at::ScalarType) const { return false; }

void Backend::wide_gram(const WideSquare&, double, const at::Tensor&) const {
  core::bug("wide_gram: the backend has no wide squares");
}

void Backend::wide_product(const WideSquare&, double, const WideSquare&, double, const WideSquare&,
                           const WideSquare&) const {
  core::bug("wide_product: the backend has no wide squares");
}

void Backend::scaled_product(const at::Tensor&, const PendingProduct&) const {
  core::bug("scaled_product: the backend has no wide squares");
}

Start Backend::start(const Update& update, at::ScalarType dtype, double eps) const {
  at::Tensor direction = take_momentum(update);
  direction = direction.reshape({-1, direction.size(-2), direction.size(-1)});
  const at::Tensor x = normalise(direction, dtype, eps);
  return {update.master.dim() == 2 ? x.squeeze(0) : x};
}

void Backend::finish(const Update& update, const PendingProduct& product) const {
  const at::Tensor& master = update.master;
  const at::Tensor direction =
      computed(*this, product).narrow(-2, 0, master.size(-2)).narrow(-1, 0, master.size(-1));
  move_weights(update, direction.view(master.sizes()));
}

std::vector<const Backend*> backends_of(c10::Device device, at::ScalarType dtype) {
  if (!device.is_cpu()) return {&aten_backend()};
  if (!kernels_multiply(dtype)) return {&cpu_backend()};
  // AMX, which PyTorch's BLAS knows, multiplies bf16 faster.
  if (dtype == at::kBFloat16 && cpuinfo_initialize() && cpuinfo_has_x86_amx_bf16()) {
    return {&cpu_backend(), &avx512_backend()};
  }
  return {&avx512_backend(), &cpu_backend()};
}

const Backend& backend_of(c10::Device device) {
  return device.is_cpu() ? cpu_backend() : aten_backend();
}

}  // namespace dmuon::newton_schulz
