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
  kSegmented,  ///< each two or three steps
  kGram,       ///< all steps, but for a restart after the second
};

/// Numbers of steps that follow each other without a product with X.
using Segments = std::vector<int>;

/// `steps` as the form divides them, kSegmented in pairs: an odd step is the last.
Segments segments(int steps, Form form);

/// Whether the first segment keeps the identity out of Q (iteration.cpp): of three steps, with
/// others to come.
bool leads(const Segments& segments);

/// How many products of each kind the orthogonalisation of an m x n matrix takes, m <= n.
struct Products {
  int to_square = 0;  ///< symmetric m x m result, inner dimension n: R = X X'
  int square = 0;     ///< symmetric m x m result, inner dimension m: Z, and the next R
  /// R Z and Z Q: symmetric because their factors commute, but in kSegmented computed in full, see
  /// iteration.cpp. Those of a segment that leads are among `square`.
  int mixed = 0;
  int to_wide = 0;  ///< m x n result, inner dimension m: Q X

  bool operator==(const Products&) const = default;
};

/// A segment of L steps takes one to_square, 2 L - 1 square, 2 L - 2 mixed and one to_wide; the
/// first of several 4 L - 3 square and none mixed.
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
/// 20 m^2 n + 10 m^3 (direct), 12 m^2 n + 22 m^3 (pairs) and 8 m^2 n + 28 m^3 (Gram); with
/// triangles 15 m^2 n + 5 m^3, 9 m^2 n + 15 m^3 and 6 m^2 n + 14 m^3. Three steps and two take
/// 6 m^2 n + 16 m^3.
double orthogonalisation(std::int64_t m, std::int64_t n, int steps, Form form,
                         const SymmetricCost& symmetric);

/// The same for steps that are divided in another way.
double orthogonalisation(std::int64_t m, std::int64_t n, const Segments& segments, Form form,
                         const SymmetricCost& symmetric);

}  // namespace dmuon::flops
