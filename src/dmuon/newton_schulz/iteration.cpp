#include "dmuon/newton_schulz/iteration.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

// The iterate X, scale x, [(b,) rows, cols], either side the shorter: `tall` matrices are read in
// the other operand order instead of being transposed.
struct Iterate {
  const Backend& backend;
  std::int64_t panel_rows;
  Tensor x;
  double scale;
  bool tall;
  Tensor spare = {};  // X's next value; a product may not overwrite its operand

  std::int64_t short_side() const { return x.size(tall ? -1 : -2); }

  Tensor square(at::ScalarType dtype) const {
    auto sizes = x.sizes().vec();
    sizes[sizes.size() - 1] = sizes[sizes.size() - 2] = short_side();
    return at::empty(sizes, x.options().dtype(dtype));
  }

  // R <- X X' on the short side, in R's dtype.
  void gram_matrix(const Tensor& r) const {
    const Tensor wide = x.to(r.scalar_type());
    const Tensor transposed = wide.mT();
    symmetric_product(r, 0, r, scale * scale, tall ? transposed : wide, tall ? wide : transposed);
  }

  void symmetric_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                         const Tensor& a, const Tensor& b) const {
    backend.symmetric_product(out, beta, c, alpha, a, b, panel_rows);
  }

  // a X + Q X. A Q in 16 bits is not quite symmetric: where X is transposed, so is Q.
  PendingProduct applied(double a, const Tensor& q) const {
    if (tall) return {scale * a, x, scale, x, q.mT(), spare};
    return {scale * a, x, scale, q, x, spare};
  }

  void become(const PendingProduct& product) {
    spare = std::exchange(x, computed(backend, product));
    scale = 1;
  }
};

// Q + a I on the diagonal in fp32: rounding a itself to 16 bits would shift every singular value.
void add_identity(const Tensor& q, double a) {
  Tensor diagonal = q.diagonal(0, -2, -1);
  const auto dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor wide = diagonal.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  at::add_out(diagonal, wide, at::scalar_tensor(a, at::kDouble));
}

// What one matrix, or a batch, keeps of the short side: a segment of one step has no q and scratch.
struct Squares {
  Tensor r;
  Tensor z;
  Tensor q;
  Tensor scratch;
};

// What X becomes by a segment.
//
// Divided by its norm, a matrix has small singular values, so that Q is close to a multiple of the
// identity. In a segment that leads (flops/newton_schulz.h) that multiple is a number of its own:
// rounding what is left costs less. Later, near 1, the two would cancel, and Q is whole.
PendingProduct run_segment(const Iterate& iterate, Squares& squares, std::span<const Row> rows,
                           bool leads) {
  auto& [r, z, q, scratch] = squares;
  double identity = 0;  // what of it Q leaves out
  // A mirrored triangle has each rounding error twice, of a full product two partly cancel: in 16
  // bits and where Q is whole that is 1.2 instead of 1.8 times the direct form's error.
  const bool in_full = !leads && c10::elementSize(r.scalar_type()) == 2;
  const auto mixed_product = [&](const Tensor& out, double a, const Tensor& c, const Tensor& left,
                                 const Tensor& right) {
    if (in_full) {
      iterate.backend.product(out, a, c, 1, left, right);
    } else {
      iterate.symmetric_product(out, a, c, 1, left, right);
    }
  };
  iterate.gram_matrix(r);
  for (std::size_t step = 0; step < rows.size(); ++step) {
    const auto& [a, b, c] = rows[step];
    const bool first = step == 0;
    const bool last = step + 1 == rows.size();
    iterate.symmetric_product(z, b, r, c, r, r);
    if (first && last) return iterate.applied(a, z.to(iterate.x.scalar_type()));
    if (!first) {
      mixed_product(scratch, a, q, z, q);
      std::swap(q, scratch);
      if (leads) {
        iterate.backend.add(q, z, identity);
        identity *= a;
      }
    }
    if (!last) {
      mixed_product(scratch, a, r, r, z);                       // R Z + a R
      iterate.symmetric_product(r, a, scratch, 1, z, scratch);  // Z (R Z + a R) + a (R Z + a R)
    }
    if (first) {
      std::swap(q, z);
      if (leads) {
        identity = a;
      } else {
        add_identity(q, a);
      }
    }
  }
  return iterate.applied(identity, q.to(iterate.x.scalar_type()));
}

}  // namespace

PendingProduct iterate(const Backend& backend, Start start, const Steps& steps) {
  const auto& [coefficients, segments, square_dtype, panel_rows] = steps;
  const bool tall = start.x.size(-2) > start.x.size(-1);
  Iterate iterate{backend, panel_rows, std::move(start.x), start.scale, tall};
  const bool longer = std::ranges::any_of(segments, [](int length) { return length > 1; });
  const auto square = [&](bool needed) { return needed ? iterate.square(square_dtype) : Tensor(); };
  Squares squares{square(true), square(true), square(longer), square(longer)};
  auto next = coefficients.begin();
  for (std::size_t i = 0;; ++i) {
    const int length = segments.at(i);
    const bool leads = i == 0 && flops::leads(segments);
    const PendingProduct product = run_segment(iterate, squares, {next, next + length}, leads);
    if (i + 1 == segments.size()) return product;
    iterate.become(product);
    next += length;
  }
}

}  // namespace dmuon::newton_schulz
