#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "dmuon/flops/newton_schulz.h"
#include "dmuon/newton_schulz/scalar.h"

namespace dmuon::newton_schulz {

/// beta c + alpha a b, not computed yet: see Products::product.
struct PendingProduct {
  double beta;
  at::Tensor c;
  double alpha;
  at::Tensor a;
  at::Tensor b;
  /// fp32 [(b,) 1, cols] or [(b,) rows, 1]: factors of c's columns or rows; undefined: none.
  /// Only for products with wide squares.
  at::Tensor factors = {};
  /// fp32 [(b,) 1, 1], known to the device alone: the result is to be multiplied by scale scales.
  /// Until then it may be of another size than the iterate; undefined: it need not be.
  at::Tensor scales = {};
  double scale = 1;
};

/// A symmetric matrix, [(b,) m, m], in fp32, and in a 16-bit dtype without its diagonal, to which
/// products add the diagonal's contribution in fp32: rounding costs most on the diagonal if a
/// matrix is near a multiple of the identity. flops::kWideSquareBytes an element.
struct WideSquare {
  at::Tensor wide;      ///< fp32; entries above the diagonal are undefined
  at::Tensor diagonal;  ///< fp32 [(b,) m], equal to wide's diagonal
  at::Tensor narrow;    ///< the iteration's 16-bit dtype; zeros on the diagonal
};

/// The matrix products of the iteration, as one backend computes them. An object is stateless and
/// thread-safe, works on the current stream and records no autograd.
///
///     const Products& products = *products_of(x.device(), x.scalar_type()).front();
///     products.symmetric_product(r, 0, r, 1, x, x.mT(), 0);  // R = X X', in one panel
///     products.product(out, a, x, b, r, x);                  // a X + b R X
///
/// Dtypes are fp64, fp32, bf16 and fp16. Matrices are [rows, cols] or, batched, [b, rows, cols].
/// The tensors of one call share dtype, device and number of dimensions, unless a function says
/// otherwise. The caller guarantees this.
/// Repeated calls give each matrix the same bits.
class Products {
 public:
  virtual ~Products() = default;

  /// The name of its file in products/, or one that begins with it; Choice::backend.
  virtual std::string_view name() const = 0;

  /// The default dtype of R = X X', Z and Q in the Gram form: `dtype` or a wider one.
  virtual at::ScalarType gram_dtype(at::ScalarType dtype) const = 0;

  /// Possible panel heights of a symmetric product with an m x m result; the default comes first.
  /// 0: one panel, the full product.
  /// @param dtype  of the iteration.
  virtual std::vector<std::int64_t> panel_rows(std::int64_t m, at::ScalarType dtype) const = 0;

  /// The cost of symmetric products with m x m results in the default panels.
  /// @param dtype  of the iteration.
  virtual flops::SymmetricCost symmetric_cost(std::int64_t m, at::ScalarType dtype) const = 0;

  /// True if matrices with this short side go through the iteration as one batch by default. If
  /// false, a Choice may not batch them. The answer depends on one matrix alone, so that a matrix
  /// takes the same path alone and in a batch.
  virtual bool batched(std::int64_t short_side, at::ScalarType dtype) const = 0;

  /// Returns how many of a batch's `count` matrices go through the iteration together: about as
  /// many as the caches hold, where caches decide the speed. At least 1. Changes no matrix's bits.
  virtual std::int64_t at_once(std::int64_t rows, std::int64_t cols, std::int64_t count,
                               at::ScalarType dtype) const = 0;

  /// out <- beta c + alpha a b. `out` may be a slice; it may be c, but must not overlap a or b.
  /// With beta = 0, c is not read.
  virtual void product(const at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                       const at::Tensor& a, const at::Tensor& b) const = 0;

  /// Computes `product` for a symmetric c and an a b that is symmetric in exact arithmetic: b is
  /// a.mT(), or a and b are symmetric. Panels have near-equal heights. Each omits the columns right
  /// of its last row; `mirror` fills them.
  ///
  /// @param out         [(b,) m, m] contiguous.
  /// @param panel_rows  the most rows of a panel; 0: one panel. Not read if the backend's panels
  ///                    have one fixed height.
  virtual void symmetric_product(const at::Tensor& out, double beta, const at::Tensor& c,
                                 double alpha, const at::Tensor& a, const at::Tensor& b,
                                 std::int64_t panel_rows) const;

  /// True if scaled_gram ever works.
  virtual bool scales_grams() const { return false; }

  /// out <- alpha factors a a', with `out` in a's dtype, of 16 bits, and the sums in fp32.
  ///
  /// @param factors  [(b,) 1, 1] fp32, contiguous, on the device.
  /// @return         False if the backend lacks this for such a matrix: then it has done nothing.
  virtual bool scaled_gram(const at::Tensor& out, double alpha, const at::Tensor& factors,
                           const at::Tensor& a) const;

  /// True if this dtype, of 16 bits, has wide squares: then the three functions below work.
  /// They need contiguous squares.
  virtual bool has_wide_squares(at::ScalarType dtype) const;

  /// out <- alpha a a', where a is [(b,) m, inner].
  virtual void wide_gram(const WideSquare& out, double alpha, const at::Tensor& a) const;

  /// out <- beta c + alpha a b, where a and b commute in exact arithmetic. out may be c; it
  /// overlaps neither a nor b.
  virtual void wide_product(const WideSquare& out, double beta, const WideSquare& c, double alpha,
                            const WideSquare& a, const WideSquare& b) const;

  /// Computes a `pending` that has factors. The entries of out's rows lie side by side.
  virtual void scaled_product(const at::Tensor& out, const PendingProduct& pending) const;

  /// weights <- decay weights + factor scale scales (beta c + alpha a b), with pending's scales,
  /// and the sums in fp32. On CPUs the product is never rounded to its dtype. A no-op if `applies`
  /// is false.
  ///
  /// @param weights  fp32; [..., rows, cols]. Rows and columns of the product beyond these are
  ///                 padding, and are left out.
  /// @param applies  [] bool on the device, which nobody waits for.
  /// @return  False if the backend lacks this for such weights: then it has done nothing.
  virtual bool add_to_weights(const at::Tensor& weights, const Scalar& decay, const Scalar& factor,
                              const PendingProduct& pending, const at::Tensor& applies) const;

 protected:
  /// Copies the entries below the panels to their mirrored places right of the panels. Panel i of p
  /// ends at row m (i + 1) / p. May make the panels' own squares symmetric too.
  virtual void mirror(const at::Tensor& out, std::int64_t num_panels) const = 0;
};

/// True for the dtypes of matrices: fp64, fp32, bf16 and fp16.
bool is_floating(at::ScalarType dtype);

/// Computes the product, with its scales.
/// @param out  of c's sizes and dtype, for the result; undefined: new memory.
/// @return     the result.
at::Tensor computed(const Products& products, const PendingProduct& pending, at::Tensor out = {});

/// The number of panels of at most `panel_rows` rows; one if panel_rows is 0.
constexpr std::int64_t num_panels(std::int64_t m, std::int64_t panel_rows) {
  return panel_rows == 0 ? 1 : (m + panel_rows - 1) / panel_rows;
}

/// FLOPs in this many panels over FLOPs of the full product: panel i computes i + 1 equal parts of
/// each row.
constexpr double panels_share(std::int64_t num_panels) {
  return (1 + 1 / static_cast<double>(num_panels)) / 2;
}

/// products/cpu.cpp: PyTorch's BLAS. A matrix also has the same bits alone and in a batch, and
/// symmetric products are the lower triangle, mirrored.
const Products& cpu_products();

/// products/avx512.cpp: the kernels of kernels/cpu in fp32 and bf16, with the same bits on any
/// number of threads; else as cpu_products. Runs on machines where kernels::cpu::multiplies.
const Products& avx512_products();

/// products/aten.cpp: ATen's operators, on any device.
const Products& aten_products();

/// products/cuda.cpp: symmetric products by kernels/cuda in fp16 and bf16; else as aten_products.
/// For devices where why_no_cuda_kernels (cuda_kernels.h) is empty.
const Products& cuda_products();

/// As cuda_products, with all other products in fp16 and bf16 by kernels/cuda too. Named cuda_full.
const Products& cuda_full_products();

/// As cuda_full_products, and its add_to_weights works: the kernel of the last product moves the
/// weights. Their bits are those of cuda_full_products and then cuda_elementwise. Named cuda_fused.
const Products& cuda_fused_products();

/// The default backend for tensors of this device if the iteration runs in `dtype`.
const Products& default_products(c10::Device device, at::ScalarType dtype);

/// Returns the backends for tensors of this device if the iteration runs in `dtype`; the default
/// comes first.
std::vector<const Products*> products_of(c10::Device device, at::ScalarType dtype);

}  // namespace dmuon::newton_schulz
