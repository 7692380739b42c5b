#include "dmuon/newton_schulz/orthogonalize.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;
using core::require;

void check(const Tensor& x) {
  require(x.defined() && x.dim() >= 2, "orthogonalize: x must be [..., m, n]; got ",
          x.defined() ? x.dim() : 0, " dimension(s)");
  require(x.layout() == at::kStrided, "orthogonalize: x must be dense; got layout ", x.layout());
  require(is_floating(x.scalar_type()), "orthogonalize: x must be fp64, fp32, bf16 or fp16; got ",
          x.scalar_type());
}

}  // namespace

Tensor orthogonalize(Tensor x, const IterationOptions& options) {
  check(x);
  check(options, "orthogonalize");
  const at::NoGradGuard no_grad;
  const auto sizes = x.sizes().vec();
  const auto result_options = x.options().dtype(options.dtype);
  if (x.numel() == 0) return at::empty(sizes, result_options);
  const std::int64_t rows = x.size(-2);
  const std::int64_t cols = x.size(-1);
  const Method method = method_for(rows, cols, x.device(), options, "orthogonalize");
  const auto orthogonalised = [&](Tensor some) {
    Start start{method.elementwise.normalise(std::exchange(some, {}), method.dtype, method.eps)};
    if (!method.batched) start.x.squeeze_(0);
    const PendingProduct last = iterate(method.products, std::move(start), method.steps);
    return computed(method.products, last).narrow(-2, 0, rows).narrow(-1, 0, cols);
  };
  Tensor matrices = std::exchange(x, {}).detach().reshape({-1, rows, cols});
  const std::int64_t count = matrices.size(0);
  const std::int64_t at_once =
      method.batched ? method.products.at_once(rows, cols, count, method.dtype) : 1;
  if (count <= at_once) return orthogonalised(std::exchange(matrices, {})).contiguous().view(sizes);
  const Tensor out = at::empty(matrices.sizes(), result_options);
  for (std::int64_t first = 0; first < count; first += at_once) {
    const std::int64_t size = std::min(at_once, count - first);
    out.narrow(0, first, size).copy_(orthogonalised(matrices.narrow(0, first, size)));
  }
  return out.view(sizes);
}

}  // namespace dmuon::newton_schulz
