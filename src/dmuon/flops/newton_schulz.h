#pragma once

#include <cstdint>
#include <vector>

namespace dmuon::flops {

// The matrix products of one orthogonalisation by Newton-Schulz, their FLOPs (two a multiply-add)
// and its workspace. The iteration chooses its form by these figures, and plans use them.

/// Forms of the iteration (newton_schulz/orthogonalize.h). They are algebraically equal, and differ
/// in the number of steps between two products with X.
enum class Form {
  kDirect,     ///< each step
  kSegmented,  ///< as many steps as 16-bit products stay exact enough (coefficients.h)
  kGram,       ///< two steps, then three at a time
};

/// Lengths of segments: steps that follow each other without a product with X.
using Segments = std::vector<int>;

/// The number of steps unless the user names another.
inline constexpr int kDefaultSteps = 5;

/// Returns the segments of `steps` steps in the direct or the Gram form.
/// @throws InternalError for kSegmented.
Segments segments(int steps, Form form);

/// The number of products of each kind in the orthogonalisation of an m x n matrix, m <= n.
/// Products of commuting matrices are symmetric too. The Gram form in 16 bits computes R Z and Z Q
/// in full (iteration.cpp); backends that omit a part of symmetric products have it in fp32.
struct Products {
  int to_square = 0;  ///< symmetric m x m result, inner dimension n: R = X X'
  int square = 0;     ///< symmetric m x m result, inner dimension m: Z, R Z, the next R and Z Q
  int to_wide = 0;    ///< m x n result, inner dimension m: Q X

  bool operator==(const Products&) const = default;
};

/// Counts products: a segment of L steps takes one to_square, 4 L - 3 square and one to_wide.
/// @param num_cubic  segments of one step whose c is 0. They need no Z: their X <- a X + b R X.
Products products(const Segments& segments, int num_cubic = 0);

/// Square matrices that the iteration holds at once: R and Z; Q and a spare one only if a segment
/// has more than one step.
int squares(const Segments& segments);

/// Bytes an element of a square that is kept in fp32 and in a 16-bit dtype
/// (newton_schulz::WideSquare).
inline constexpr int kWideSquareBytes = 4 + 2;

/// FLOPs of a full product with a rows x cols result.
constexpr double product(double rows, double cols, double inner) { return 2 * rows * cols * inner; }

/// The cost of a backend's symmetric products.
struct SymmetricCost {
  double share = 1;  ///< FLOPs over a full product's: at least 1/2, a triangle's share
  /// A FLOP in the Gram form's dtype for R, Z and Q takes the time of this many FLOPs in the
  /// working dtype.
  double gram_dtype = 1;
};

/// FLOPs of `steps` steps on one m x n matrix, either order of sides. kGram's products in the Gram
/// dtype are weighted by their cost. Five steps with full products take 20 m^2 n + 10 m^3 (direct)
/// and 8 m^2 n + 28 m^3 (two segments). With triangles they take 15 m^2 n + 5 m^3 and 6 m^2 n + 14
/// m^3; three segments take 9 m^2 n + 11 m^3.
double orthogonalisation(std::int64_t m, std::int64_t n, int steps, Form form,
                         const SymmetricCost& symmetric);

/// The same for other segments.
/// @param num_cubic  as for `products`.
double orthogonalisation(std::int64_t m, std::int64_t n, const Segments& segments, Form form,
                         const SymmetricCost& symmetric, int num_cubic = 0);

}  // namespace dmuon::flops
