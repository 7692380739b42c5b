#pragma once

#include <cstdint>
#include <vector>

namespace dmuon::flops {

// Which matrix products one orthogonalisation by Newton-Schulz takes, and their FLOPs, two a
// multiply-add. The iteration chooses its form by these figures, and plans are made with them.

/// Algebraically equal forms of the iteration (newton_schulz/orthogonalize.h), which differ in the
/// number of steps between two of its products with X.
enum class Form {
  kDirect,     ///< each step
  kSegmented,  ///< as products in the working dtype remain exact enough (coefficients.h)
  kGram,       ///< all steps, but for a restart after the second
};

/// Numbers of steps that follow each other without a product with X.
using Segments = std::vector<int>;

/// `steps` as kDirect and kGram divide them.
/// @throws InternalError for kSegmented.
Segments segments(int steps, Form form);

/// How many products of each kind the orthogonalisation of an m x n matrix takes, m <= n. Those of
/// matrices that commute are symmetric too, but in 16 bits R Z and Z Q are computed in full
/// (iteration.cpp).
struct Products {
  int to_square = 0;  ///< symmetric m x m result, inner dimension n: R = X X'
  int square = 0;     ///< symmetric m x m result, inner dimension m: Z, R Z, the next R and Z Q
  int to_wide = 0;    ///< m x n result, inner dimension m: Q X

  bool operator==(const Products&) const = default;
};

/// A segment of L steps takes one to_square, 4 L - 3 square and one to_wide.
Products products(const Segments& segments);

/// FLOPs of a full product with a rows x cols result.
constexpr double product(double rows, double cols, double inner) { return 2 * rows * cols * inner; }

/// How a backend runs symmetric products.
struct SymmetricCost {
  double share = 1;  ///< FLOPs over those of a full product: at least 1/2, which is a triangle's
  /// Time of a FLOP in the Gram form's dtype for R, Z and Q over one in the working dtype.
  double gram_dtype = 1;
};

/// FLOPs of `steps` steps on one m x n matrix (either order of sides), those in the Gram dtype,
/// which is kGram's alone, weighted by their cost. Five steps with full products take
/// 20 m^2 n + 10 m^3 (direct) and 8 m^2 n + 28 m^3 (two segments); with triangles 15 m^2 n + 5 m^3
/// and 6 m^2 n + 14 m^3. Three segments take 9 m^2 n + 11 m^3.
double orthogonalisation(std::int64_t m, std::int64_t n, int steps, Form form,
                         const SymmetricCost& symmetric);

/// The same for steps that are divided in another way.
double orthogonalisation(std::int64_t m, std::int64_t n, const Segments& segments, Form form,
                         const SymmetricCost& symmetric);

}  // namespace dmuon::flops
