#pragma once

#include <optional>

#include "dmuon/flops/newton_schulz.h"
#include "dmuon/newton_schulz/coefficients.h"
#include "dmuon/newton_schulz/elementwise.h"
#include "dmuon/newton_schulz/products.h"

namespace dmuon::newton_schulz {

/// The steps of an iteration, and the form in which they run.
struct Steps {
  Coefficients coefficients;  ///< one row a step
  flops::Segments segments;   ///< their lengths add up to the number of rows
  /// The dtype of R, Z and Q; unset: each is a WideSquare (products.h).
  std::optional<at::ScalarType> square_dtype;
  std::int64_t panel_rows;  ///< of symmetric products; not read for WideSquares
  /// True if R Z and Z Q are symmetric products in 16 bits too: kSegmented, not kGram.
  bool symmetric_mixed = false;
};

/// Runs all of Newton-Schulz but its last product. The result of that product would be the iterate,
/// so it can be added straight to where it is wanted. Works on the current stream.
///
/// @param start  x is [(b,) rows, cols]; either side may be the shorter. The iteration may write to
///               it, and the returned product may have it as its operand.
/// @return       without steps, scale x as a product.
PendingProduct iterate(const Products& products, Start start, const Steps& steps);

}  // namespace dmuon::newton_schulz
