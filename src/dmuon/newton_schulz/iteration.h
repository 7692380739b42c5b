#pragma once

#include <optional>

#include "dmuon/flops/newton_schulz.h"
#include "dmuon/newton_schulz/backend.h"
#include "dmuon/newton_schulz/coefficients.h"

namespace dmuon::newton_schulz {

/// How orthogonalize runs its steps.
struct Steps {
  Coefficients coefficients;  ///< at least one row
  flops::Segments segments;   ///< which make up the rows
  /// The dtype of R, Z and Q; unset: each is a WideSquare (backend.h).
  std::optional<at::ScalarType> square_dtype;
  std::int64_t panel_rows;  ///< of symmetric products; not read of WideSquares
};

/// All of Newton-Schulz but its last product, whose result the iterate would be: it may go straight
/// to where it is wanted. Works on the current stream.
///
/// @param start  x [(b,) rows, cols], either side the shorter. It is new memory: the iteration may
///               write there, and the product returned may have it as its operand.
PendingProduct iterate(const Backend& backend, Start start, const Steps& steps);

}  // namespace dmuon::newton_schulz
