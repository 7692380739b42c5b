#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/layout/mesh.h"
#include "dmuon/layout/parameter.h"

namespace dmuon::plan {

using core::Owner;
using core::ParameterIndex;
using core::PerParameter;
using core::PerShape;
using core::Replicate;
using core::ShapeIndex;
using core::Shard;
using core::Slot;
using core::UnitIndex;
using layout::Inventory;
using layout::Mesh;
using layout::Parameter;
using layout::Shape;
using layout::View;

/// The most rows or columns of a matrix.
inline constexpr std::int64_t kMaxSide = (std::int64_t{1} << 31) - 1;

/// The parameters by shape; only equal shapes share a batch.
struct ShapeGroups {
  PerShape<Shape> shapes;      ///< distinct, by first appearance
  PerShape<int> num_matrices;  ///< parameters, which is what balance counts
  PerParameter<ShapeIndex> shape_of;
};

/// @throws InvalidArgument unless
///         - every parameter has a name of its own and a unit >= 0;
///         - numbers of matrices, rows and cols are in [1, 2^31), and column_blocks divide cols;
///         - heights are none or several, each >= 1, their sum divides rows, and the matrices are
///           neither in blocks of columns, nor transposed, nor over tensor parallelism;
///         - all parameters together have at most 2^56 elements;
///         - a parameter that continues another follows one of its unit;
///         - leaves whose parameters have columns are cut into equal parts, from column 0 on.
void validate(const Inventory& inventory);

/// True if the parameter after it is of the same leaf.
bool is_continued(const Inventory& inventory, ParameterIndex parameter);

/// @param inventory valid.
ShapeGroups group_by_shape(const Inventory& inventory);

/// The matrices of each unit, units in the order of their first matrices.
core::Vector<UnitIndex, std::vector<ParameterIndex>> group_by_unit(const Inventory& inventory);

/// The unit of each matrix, numbered as by group_by_unit.
PerParameter<UnitIndex> units_of(const Inventory& inventory);

}  // namespace dmuon::plan
