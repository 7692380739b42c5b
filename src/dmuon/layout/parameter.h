#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/core/index.h"

namespace dmuon::layout {

/// What is alike of parameters that may share a batch.
struct Shape {
  /// Of each matrix that is orthogonalised, as it is stored. If heights are given: of all parts.
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  bool tensor_parallel = false;    ///< what gathers and scatters costs more
  std::int64_t num_matrices = 1;   ///< of one parameter, which stay together
  std::int64_t column_blocks = 1;  ///< so many of them lie side by side
  bool transposed = false;
  std::vector<std::int64_t> heights{};  ///< View::heights

  std::int64_t num_elements() const { return num_matrices * rows * cols; }
  /// Returns the shapes whose costs add up to this one's: one for each of the interleaved parts,
  /// or a single one. They lack what costs do not depend on: where in memory the matrices lie, and
  /// how.
  std::vector<Shape> of_costs() const;
  auto operator<=>(const Shape&) const = default;
};

/// "3584 x 18944", of several matrices "64 of 512 x 2048", of three side by side "512 x 3*512", of
/// interleaved ones "16*(128 + 64) x 1536"; with " transposed" and " over TP" where it is.
std::string to_string(const Shape& shape);

/// Rows of a stored matrix that are orthogonalised together: `height` ones of each group, from
/// `first` on.
struct RowPart {
  std::int64_t first = 0;
  std::int64_t height = 0;

  bool operator==(const RowPart&) const = default;
};

/// The matrices of a parameter, one after the other in memory. They are orthogonalised, or, where
/// column_blocks is more than 1, so many equally wide blocks of columns of each of them.
///
/// If heights are given, rows are interleaved. A stored matrix then consists of equal groups of
/// rows, and each group of parts of these heights, one above the other. The i-th parts of all
/// groups are one matrix:
///
///   {1, 96, 64, .heights = {16, 8}}  // 4 groups of 24 rows: matrices of 64 and of 32 rows
struct View {
  std::int64_t num_matrices = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;  ///< of all blocks together
  std::int64_t column_blocks = 1;
  bool transposed = false;  ///< stored as [in, out]: the learning rate takes cols for the rows
  /// Of the parts in a group of rows, at least two; their sum divides `rows`. Empty: rows are not
  /// interleaved. Excludes column_blocks and `transposed`.
  std::vector<std::int64_t> heights{};

  std::int64_t num_elements() const { return num_matrices * rows * cols; }
  /// Returns the parts of a group of rows; all rows if they are not interleaved.
  std::vector<RowPart> row_parts() const;
  /// Returns the number of groups of rows; 1 if they are not interleaved.
  std::int64_t num_groups() const;
  /// Returns the rows of the matrix that a part of all groups is.
  std::int64_t rows_of(const RowPart& part) const { return num_groups() * part.height; }
  /// Returns what `heights` must be and what they are, for an error; "" if nothing is wrong.
  std::string problem_of_heights() const;
  /// [rows, cols], or [num_matrices, rows, cols] of several.
  std::vector<std::int64_t> sizes() const {
    if (num_matrices == 1) return {rows, cols};
    return {num_matrices, rows, cols};
  }
  bool operator==(const View&) const = default;
};

/// What has one owner: a parameter of the model, or some of the matrices of one.
struct Parameter {
  std::string name;  ///< fully qualified
  View view;
  int unit = 0;                  ///< index, >= 0, of the module whose hooks move it
  bool tensor_parallel = false;  ///< sharded over the tensor-parallel group of its slot
  bool continues = false;  ///< the leaf of the parameter before it, in packed buffers without a gap
  /// The only one whose ranks have it, by expert parallelism, and of which its owner is.
  std::optional<core::Shard> column{};

  Shape shape() const {
    return {view.rows,          view.cols / view.column_blocks,
            tensor_parallel,    view.num_matrices * view.column_blocks,
            view.column_blocks, view.transposed,
            view.heights};
  }
  std::int64_t num_elements() const { return view.num_elements(); }
  bool operator==(const Parameter&) const = default;
};

/// All parameters in module order, which planning takes for execution order.
using Inventory = core::PerParameter<Parameter>;

/// A parameter and the slot that owns it.
struct OwnedParameter : Parameter {
  core::Slot owner;

  core::UnitIndex unit_index() const { return core::UnitIndex(unit); }
  bool operator==(const OwnedParameter&) const = default;
};

using Parameters = core::PerParameter<OwnedParameter>;

}  // namespace dmuon::layout
