#include "dmuon/newton_schulz/iteration.h"

#include <ATen/ops/add.h>
#include <ATen/ops/scalar_tensor.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "dmuon/newton_schulz/scratch.h"

namespace dmuon::newton_schulz {
namespace {

using at::Tensor;

// The iterate X = scale scales x, [(b,) rows, cols]; either side may be the shorter. `tall`
// matrices are not transposed: their products have the operands in the other order.
//
// The steps are linear in X but for its norm in R = X X'. So the host's scale is a factor of the
// next product. The device's scales are one of R, and of the last product, which its reader
// applies.
struct Iterate {
  Iterate(const Products& backend, Start start)
      : products(backend),
        x(std::move(start.x)),
        tall(x.size(-2) > x.size(-1)),
        scale(start.scale),
        factor(start.scale),
        scales(std::move(start.scales)),
        elementwise(start.elementwise) {
    if (!scales.defined()) return;
    factor = factor_for(x.size(-2) * x.size(-1));
    if (!products.scales_grams()) return;
    squares = start.squares.defined() ? std::move(start.squares) : scales.mul(scales);
  }

  const Products& products;
  Tensor x;
  bool tall;
  double scale;
  double factor;  // of the next product of x
  Tensor scales;
  const Elementwise* elementwise;
  Tensor squares = {};  // of the scales, if products can use them
  Tensor spare = {};    // memory for X's next value: a product may not overwrite its operand

  std::vector<std::int64_t> square_sizes() const {
    auto sizes = x.sizes().vec();
    sizes[sizes.size() - 1] = sizes[sizes.size() - 2] = x.size(tall ? -1 : -2);
    return sizes;
  }

  // X with its short side first.
  Tensor upright() const { return tall ? x.mT() : x; }

  // a X + b Q X. `factors` scale the rows of the upright X. A Q in 16 bits is not quite symmetric:
  // if X is transposed, so is Q.
  PendingProduct applied(double a, double b, const Tensor& q, const Tensor& factors = {}) const {
    if (tall) return {factor * a, x, factor * b, x, q.mT(), factors};
    return {factor * a, x, factor * b, q, x, factors};
  }

  void become(const PendingProduct& product) {
    const Tensor next = computed(products, product, std::move(spare));
    spare = std::exchange(x, next);
    scale /= std::exchange(factor, 1);
  }

  // The last product of x.
  PendingProduct scaled(PendingProduct product) const {
    product.scales = scales;
    product.scale = scale / factor;
    return product;
  }

  // For products that know only the host's scale: X = x.
  void multiply() {
    if (!scales.defined()) return;
    if (scale != 1) uses_pytorch("multiplies scales");
    elementwise->multiply(x, scale == 1 ? scales : scales.mul(scale));
    scales = squares = Tensor();
    scale = factor = 1;
  }

 private:
  // Entries are below 2^15, so the norm is below 2^15 times the root of their number. Returns what
  // makes it less than 2^14. The next x then fits fp16, whose largest number is 65504: an entry is
  // at most the norm of this x times a singular value of the next X, which is about 1.
  static double factor_for(std::int64_t entries) {
    return std::exp2(-1 - std::ceil(std::log2(static_cast<double>(entries)) / 2));
  }
};

// R, Z and Q in one dtype.
struct InOneDtype {
  using Square = Tensor;

  Iterate& iterate;
  at::ScalarType dtype;
  std::int64_t panel_rows;
  bool symmetric_mixed;

  Tensor square() const {
    return scratch_tensor(iterate.square_sizes(), iterate.x.options().dtype(dtype));
  }

  // R <- X X' on the short side.
  void gram_product(const Tensor& r) const {
    const double scale = iterate.scale * iterate.scale;
    const bool scales = iterate.squares.defined() && dtype == iterate.x.scalar_type();
    if (scales && iterate.products.scaled_gram(r, scale, iterate.squares, iterate.upright()))
      return;
    iterate.multiply();
    if (dtype != iterate.x.scalar_type()) uses_pytorch("converts matrices");
    const Tensor x = iterate.upright().to(dtype);
    iterate.products.symmetric_product(r, 0, r, iterate.scale * iterate.scale, x, x.mT(),
                                       panel_rows);
  }

  // out <- beta c + alpha a b by the lower triangle: Z and the next R.
  void square_product(const Tensor& out, double beta, const Tensor& c, double alpha,
                      const Tensor& a, const Tensor& b) const {
    iterate.products.symmetric_product(out, beta, c, alpha, a, b, panel_rows);
  }

  // out <- beta c + a b: R Z and Z Q. A mirrored triangle has each rounding error twice; in a full
  // product the two errors partly cancel. A third step of a segment would amplify them (bench/
  // segment_errors.py), and the Gram form has one: in 16 bits its mixed products are full.
  void mixed_product(const Tensor& out, double beta, const Tensor& c, const Tensor& a,
                     const Tensor& b) const {
    if (c10::elementSize(dtype) == 2 && !symmetric_mixed)
      return iterate.products.product(out, beta, c, 1, a, b);
    square_product(out, beta, c, 1, a, b);
  }

  // Q + a I, its diagonal in fp32: rounding a itself to 16 bits would shift every singular value.
  void add_identity(const Tensor& q, double a) const {
    uses_pytorch("adds to diagonals");
    Tensor diagonal = q.diagonal(0, -2, -1);
    const auto wide_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor wide = diagonal.to(wide_dtype, /*non_blocking=*/false, /*copy=*/true);
    at::add_out(diagonal, wide, at::scalar_tensor(a, at::kDouble));
  }

  // (a I + b Q) X.
  PendingProduct applied(double a, const Tensor& q, double b = 1) const {
    return iterate.applied(a, b, q.to(iterate.x.scalar_type()));
  }
};

// R, Z and Q are WideSquares, in fp32 and in X's dtype.
struct InFp32 {
  using Square = WideSquare;

  Iterate& iterate;

  Square square() const {
    const std::vector<std::int64_t> sizes = iterate.square_sizes();
    const auto options = iterate.x.options();
    const auto wide = options.dtype(at::kFloat);
    return {scratch_tensor(sizes, wide),
            scratch_tensor(at::IntArrayRef(sizes).slice(0, sizes.size() - 1), wide),
            scratch_tensor(sizes, options)};
  }

  void gram_product(const Square& r) const {
    iterate.multiply();
    iterate.products.wide_gram(r, iterate.scale * iterate.scale, iterate.upright());
  }

  void square_product(const Square& out, double beta, const Square& c, double alpha,
                      const Square& a, const Square& b) const {
    iterate.products.wide_product(out, beta, c, alpha, a, b);
  }

  void mixed_product(const Square& out, double beta, const Square& c, const Square& a,
                     const Square& b) const {
    square_product(out, beta, c, 1, a, b);
  }

  void add_identity(const Square& q, double a) const {
    q.wide.diagonal(0, -2, -1).add_(a);
    q.diagonal.add_(a);
  }

  PendingProduct applied(double a, const Square& q, double b = 1) const {
    const Tensor scaled = b == 1 ? q.diagonal : q.diagonal.mul(b);
    const Tensor diagonal = a == 0 ? scaled : scaled.add(a);
    return iterate.applied(1, b, q.narrow, diagonal.unsqueeze(iterate.tall ? -2 : -1));
  }
};

// The square matrices of the iteration, flops::squares of them: q and scratch only if a segment has
// more than one step.
template <typename Square>
struct Squares {
  Square r;
  Square z;
  Square q = {};
  Square scratch = {};
};

// Returns X after a segment.
template <typename Kind>
PendingProduct run_segment(const Kind& kind, Squares<typename Kind::Square>& squares,
                           std::span<const Row> rows) {
  auto& [r, z, q, scratch] = squares;
  kind.gram_product(r);
  for (std::size_t step = 0; step < rows.size(); ++step) {
    const auto& [a, b, c] = rows[step];
    const bool first = step == 0;
    const bool last = step + 1 == rows.size();
    if (first && last && c == 0) return kind.applied(a, r, b);  // Z would take a product
    kind.square_product(z, b, r, c, r, r);
    if (first && last) return kind.applied(a, z);
    if (!first) {
      kind.mixed_product(scratch, a, q, z, q);
      std::swap(q, scratch);
    }
    if (!last) {
      kind.mixed_product(scratch, a, r, r, z);            // R Z + a R
      kind.square_product(r, a, scratch, 1, z, scratch);  // Z (R Z + a R) + a (R Z + a R)
    }
    if (first) {
      std::swap(q, z);
      kind.add_identity(q, a);
    }
  }
  return kind.applied(0, q);
}

template <typename Kind>
PendingProduct run(Iterate& iterate, const Kind& kind, const Steps& steps) {
  Squares<typename Kind::Square> squares{kind.square(), kind.square()};
  if (flops::squares(steps.segments) > 2) {
    squares.q = kind.square();
    squares.scratch = kind.square();
  }
  auto next = steps.coefficients.begin();
  for (std::size_t i = 0;; ++i) {
    const int length = steps.segments.at(i);
    const PendingProduct product = run_segment(kind, squares, {next, next + length});
    if (i + 1 == steps.segments.size()) return iterate.scaled(product);
    iterate.become(product);
    next += length;
  }
}

// scale scales x, as a product of matrices without inner entries.
PendingProduct unchanged(Start start) {
  auto sizes = start.x.sizes().vec();
  sizes.back() = 0;
  const Tensor a = scratch_tensor(sizes, start.x.options());
  sizes.back() = start.x.size(-1);
  sizes[sizes.size() - 2] = 0;
  const Tensor b = scratch_tensor(sizes, a.options());
  return {start.scale, std::move(start.x), 0, a, b, {}, std::move(start.scales)};
}

}  // namespace

PendingProduct iterate(const Products& products, Start start, const Steps& steps) {
  if (steps.segments.empty()) return unchanged(std::move(start));
  Iterate iterate(products, std::move(start));
  if (!steps.square_dtype) return run(iterate, InFp32{iterate}, steps);
  return run(iterate,
             InOneDtype{iterate, *steps.square_dtype, steps.panel_rows, steps.symmetric_mixed},
             steps);
}

}  // namespace dmuon::newton_schulz
