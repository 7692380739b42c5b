#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dmuon::plan {

struct Shape {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  bool tensor_parallel = false;  ///< what gathers and scatters costs more

  std::int64_t num_elements() const { return rows * cols; }
  bool operator==(const Shape&) const = default;
};

/// "3584 x 18944", with " over TP" where it is.
std::string to_string(const Shape& shape);

/// One dedicated 2-D parameter.
struct Matrix {
  std::string name;  ///< fully qualified
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  int unit = 0;                  ///< index, >= 0, of the module whose hooks move it
  bool tensor_parallel = false;  ///< sharded over the tensor-parallel group of its slot

  Shape shape() const { return {rows, cols, tensor_parallel}; }
  std::int64_t num_elements() const { return rows * cols; }
  bool operator==(const Matrix&) const = default;
};

/// The most rows or columns of a matrix.
inline constexpr std::int64_t kMaxSide = (std::int64_t{1} << 31) - 1;

/// All matrices in module order, which planning takes for execution order.
using Inventory = std::vector<Matrix>;

/// The matrices by shape; only equal shapes share a batch.
struct ShapeGroups {
  std::vector<Shape> shapes;      ///< [S] distinct, by first appearance
  std::vector<int> num_matrices;  ///< [S]
  std::vector<int> shape_of;      ///< [num_matrices in the inventory], index into shapes
};

/// @throws InvalidArgument unless every matrix has a name of its own, rows and cols in
///         [1, 2^31), a unit >= 0, and all of them at most 2^56 elements.
void validate(const Inventory& inventory);

/// @param inventory valid.
ShapeGroups group_by_shape(const Inventory& inventory);

/// Elements of all matrices of each unit, in the order of the units' first matrices.
std::vector<std::int64_t> elements_of_units(const Inventory& inventory);

}  // namespace dmuon::plan
