#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "dmuon/flops/newton_schulz.h"

namespace dmuon::newton_schulz {

class Backend;

/// Where an iteration starts: X = scale x. Folded into the first products, the scale takes no pass
/// over x.
struct Start {
  at::Tensor x;
  double scale = 1;
};

/// beta c + alpha a b, not computed yet: see Backend::product.
struct PendingProduct {
  double beta;
  at::Tensor c;
  double alpha;
  at::Tensor a;
  at::Tensor b;
  at::Tensor spare = {};  ///< of c's size and dtype, free to hold the result; may be undefined
  /// fp32 [(b,) 1, cols] or [(b,) rows, 1], with which c is multiplied first; undefined: nothing.
  /// Only where the backend has wide squares.
  at::Tensor factors = {};
};

/// A symmetric matrix, [(b,) m, m], in fp32 and, for bf16 products, without its diagonal in bf16:
/// see kernels::WideSquare. 6 bytes an element.
struct WideSquare {
  at::Tensor wide;      ///< fp32; what lies above the diagonal means nothing
  at::Tensor diagonal;  ///< fp32 [(b,) m], the same numbers as on wide's
  at::Tensor narrow;    ///< bf16; zeros on the diagonal
};

/// The product's result, in its `spare` where there is one, else in new memory.
at::Tensor computed(const Backend& backend, const PendingProduct& product);

/// A Muon update of equally shaped matrices, [..., rows, cols] in fp32, which need not follow each
/// other in memory. Where it does not apply, all keep their values, whatever the gradient holds; of
/// master's, zeros may change their sign. Where it applies and a matrix's gradient has a NaN or an
/// infinity, its momentum has it too, and all its weights become NaN.
struct Update {
  at::Tensor master;
  at::Tensor momentum;
  at::Tensor gradient;  ///< unchanged
  double mu;
  bool nesterov;
  double decay;
  double lr;
  at::Tensor applies;  ///< [] bool; nobody waits for the device to know it
};

/// What a Muon update needs of a kind of device: operations on tensors, and the choices that
/// depend on how fast they are. Backends have no state, are thread-safe, work on the current stream
/// and record no autograd.
///
/// Dtypes are fp64, fp32, bf16 and fp16. Matrices are [rows, cols] or, batched, [b, rows, cols].
/// Tensors of one call share dtype, device and number of dimensions, unless the function says
/// otherwise: the caller sees to that.
/// Each matrix's result is the same bits run to run.
class Backend {
 public:
  virtual ~Backend() = default;

  /// The name of its file in backends/, and so its name in a Choice.
  virtual std::string_view name() const = 0;

  /// The dtype Newton-Schulz runs in when the user names none.
  virtual at::ScalarType default_dtype() const = 0;

  /// The dtype in which the Gram form keeps R = X X', Z and Q by default: `dtype` or a wider one.
  virtual at::ScalarType gram_dtype(at::ScalarType dtype) const = 0;

  /// In which panels a symmetric product with an m x m result may be computed when the working
  /// dtype is `dtype`: their rows, the default's first; 0: in full.
  virtual std::vector<std::int64_t> panel_rows(std::int64_t m, at::ScalarType dtype) const = 0;

  /// What symmetric products with m x m results cost by default when the working dtype is `dtype`.
  virtual flops::SymmetricCost symmetric_cost(std::int64_t m, at::ScalarType dtype) const = 0;

  /// Whether matrices of this short side are orthogonalised as one batch rather than one by one,
  /// unless something else is chosen for them; where this is false nothing else may be.
  /// It depends on one matrix alone, so that a matrix takes the same path alone and in a batch.
  virtual bool batched(std::int64_t short_side, at::ScalarType dtype) const = 0;

  /// How many of a batch's `count` matrices go through the iteration at once: about as many as
  /// caches hold, where they decide how fast it is. At least 1; no matrix's bits depend on it.
  virtual std::int64_t at_once(std::int64_t rows, std::int64_t cols, std::int64_t count,
                               at::ScalarType dtype) const = 0;

  /// Divides every matrix by its Frobenius norm, or by `eps` where that is larger, then rounds to
  /// `dtype`. Safe for entries of any
  /// size that the input's dtype holds (1e-30 .. 1e30 and beyond). A zero matrix stays zero; what
  /// is not finite becomes NaN, of which products make a matrix of NaN.
  ///
  /// @param x  [b, rows, cols], of any of the dtypes; rows and cols at least 1.
  /// @return   [b, rows', cols'] contiguous, new: rows' >= rows and cols' >= cols as the backend's
  ///           products like them, padded with zeros, which the iteration keeps zero.
  virtual at::Tensor normalise(const at::Tensor& x, at::ScalarType dtype, double eps) const = 0;

  /// out <- beta c + alpha a b. `out` may be a slice; it must not overlap a or b, but may be c.
  /// With beta = 0, c is not read.
  virtual void product(const at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                       const at::Tensor& a, const at::Tensor& b) const = 0;

  /// The same for a product a b that is symmetric in exact arithmetic, and a symmetric c: each of
  /// the panels, of near-equal height, leaves out what lies right of its last row and is mirrored.
  ///
  /// @param out         [(b,) m, m] contiguous.
  /// @param panel_rows  at least 0, of a panel at most; 0: one panel. A backend with panels of one
  ///                    height does not read it.
  virtual void symmetric_product(const at::Tensor& out, double beta, const at::Tensor& c,
                                 double alpha, const at::Tensor& a, const at::Tensor& b,
                                 std::int64_t panel_rows) const;

  /// Whether products of this dtype may be kept as a WideSquare, by what follows; else nothing of
  /// it may be called. Tensors of squares are contiguous.
  virtual bool has_wide_squares(at::ScalarType dtype) const;

  /// out <- alpha a a', of [(b,) m, inner].
  virtual void wide_gram(const WideSquare& out, double alpha, const at::Tensor& a) const;

  /// out <- beta c + alpha a b of squares, where a and b commute in exact arithmetic. out may be c;
  /// it overlaps neither a nor b.
  virtual void wide_product(const WideSquare& out, double beta, const WideSquare& c, double alpha,
                            const WideSquare& a, const WideSquare& b) const;

  /// product of what has factors. Entries of out's rows lie side by side.
  virtual void scaled_product(const at::Tensor& out, const PendingProduct& pending) const;

  // Before and after the iteration.

  /// Moves the momentum, and makes of its direction what the iteration starts from: take_momentum,
  /// then normalise. A backend may do both in one pass over memory.
  /// @param update  one matrix, [rows, cols], or a batch, [..., rows, cols].
  /// @return        x in new memory, of normalise's sizes: [rows', cols'], or [b, rows', cols'],
  ///                where b counts all matrices of the batch.
  virtual Start start(const Update& update, at::ScalarType dtype, double eps) const;

  /// move_weights by the result of the iteration's last product. A backend may add that to the
  /// weights where it computes it, and then does not round it to the iteration's dtype.
  /// @param product  [(b,) rows', cols'], of the iteration's dtype. Rows and columns beyond those
  ///                 of the update's matrices are padding, and are left out.
  virtual void finish(const Update& update, const PendingProduct& product) const;

  /// momentum <- momentum + (1 - mu) (gradient - momentum), and the direction that follows:
  /// gradient + mu (momentum - gradient) with nesterov, else momentum. Where it does not apply
  /// momentum keeps its values and is the direction, whatever the gradient holds.
  /// @return  momentum itself where that is the direction, else new.
  virtual at::Tensor take_momentum(const Update& update) const = 0;

  /// master <- decay master - lr direction, in place.
  /// @param direction  of master's sizes, finite, of any of the dtypes and strides.
  virtual void move_weights(const Update& update, const at::Tensor& direction) const = 0;

 protected:
  /// Fills what is right of the panels, of which panel i of p ends at row m (i + 1) / p, with what
  /// is below; a backend may make the panels' own squares symmetric too.
  virtual void mirror(const at::Tensor& out, std::int64_t num_panels) const = 0;
};

/// How many panels of at most `panel_rows` rows m rows are; one where panel_rows is 0.
constexpr std::int64_t num_panels(std::int64_t m, std::int64_t panel_rows) {
  return panel_rows == 0 ? 1 : (m + panel_rows - 1) / panel_rows;
}

/// FLOPs in that many panels over those in full: panel i computes i + 1 equal parts of each row.
constexpr double panels_share(std::int64_t num_panels) {
  return (1 + 1 / static_cast<double>(num_panels)) / 2;
}

/// backends/cpu.cpp: the products of PyTorch's BLAS. A matrix's result is also bitwise the same
/// alone and in a batch, and symmetric products are the lower triangle, mirrored.
const Backend& cpu_backend();

/// backends/avx512.cpp: the same but for products in fp32 and bf16, which are those of kernels/,
/// and have the same bits on any number of threads. For machines of kernels::multiplies.
const Backend& avx512_backend();

/// backends/aten.cpp: whatever the device, by ATen's operators alone.
const Backend& aten_backend();

/// The backends that may work on tensors of this device when Newton-Schulz runs in `dtype`, of
/// which the first is the default.
std::vector<const Backend*> backends_of(c10::Device device, at::ScalarType dtype);

/// The one among them that knows the default dtype, and whose elementwise functions are the others'
/// too.
const Backend& backend_of(c10::Device device);

}  // namespace dmuon::newton_schulz
