#pragma once

#include <cstdint>

namespace dmuon::flops {

// Which matrix products one orthogonalisation by Newton-Schulz takes, and their FLOPs, two a
// multiply-add. The iteration chooses its form by these figures, and plans are made with them.

/// The two algebraically equal forms of the iteration (newton_schulz/orthogonalize.h).
enum class Form { kDirect, kGram };

/// The step index before which the Gram form applies Q to X and starts afresh.
inline constexpr int kRestartStep = 2;

/// How many products of each kind the orthogonalisation of an m x n matrix takes, m <= n.
struct Products {
  int to_square = 0;  ///< symmetric m x m result, inner dimension n: R = X X'
  int square = 0;     ///< symmetric m x m result, inner dimension m
  int to_wide = 0;    ///< m x n result, inner dimension m: Q X
};

/// Products of `steps` steps. The direct form takes one of each kind a step. The Gram form takes
/// one to_square, 4 L - 3 square and one to_wide for a segment of L steps; there are two segments
/// when steps > kRestartStep, else one.
Products products(int steps, Form form);

/// FLOPs of a full product with a rows x cols result.
constexpr double product(double rows, double cols, double inner) { return 2 * rows * cols * inner; }

/// How a backend runs symmetric products.
struct SymmetricCost {
  double share = 1;  ///< FLOPs over those of a full product: at least 1/2, which is a triangle's
  /// Time of a FLOP in the Gram form's dtype for R, Z and Q over one in the working dtype.
  double gram_dtype = 1;
};

/// FLOPs of `steps` steps on one m x n matrix (either order of sides), those in the Gram dtype
/// weighted by their cost. Five steps with full products take 20 m^2 n + 10 m^3 (direct) and
/// 8 m^2 n + 28 m^3 (Gram); with triangles 15 m^2 n + 5 m^3 and 6 m^2 n + 14 m^3.
double orthogonalisation(std::int64_t m, std::int64_t n, int steps, Form form,
                         const SymmetricCost& symmetric);

/// The form that costs less; a tie goes to the direct form.
Form cheaper_form(std::int64_t m, std::int64_t n, int steps, const SymmetricCost& symmetric);

}  // namespace dmuon::flops
