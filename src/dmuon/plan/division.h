#pragma once

#include <cstdint>

#include "dmuon/layout/mesh.h"
#include "dmuon/plan/inventory.h"

namespace dmuon::plan {

/// Elements; 1 MB in 16 bits. A message of less takes about as long as an empty one, and what a
/// step's host side does for a part does not depend on its size.
inline constexpr std::int64_t kSmallestPart = std::int64_t{1} << 19;

/// The inventory with large stacks (several matrices of one shape: experts, heads) in parts, so
/// that no owner must take all matrices of one. A part has at most 1/8 of an owner's share of all
/// work, unless it would then have less than one matrix, whose blocks of columns stay together, or
/// than `smallest_part`. Parts of a stack are equal, as few as do, and follow each other; matrices
/// [a, b) of `name` are "name[a:b]". What has parts already stays as it is, but those of single
/// columns of the mesh; and everything stays whose owner there is no choice of. Deterministic.
/// @throws InvalidArgument as validate, and for a smallest part of less than an element.
/// @param smallest_part  elements that a part has at least, 1 or more.
Inventory divide(const Inventory& inventory, Mesh mesh, std::int64_t smallest_part = kSmallestPart);

/// The inventory as it was before divide(): neighbouring parts of a leaf, of equal shapes and
/// one column, are one parameter again, under the leaf's name where they are all of it.
Inventory join(const Inventory& inventory);

/// Equal parts of a leaf, of one column where they have columns, change owners among themselves so
/// that those of one owner follow each other, and owners of one column: they travel as one message.
/// Loads stay what they are.
PerParameter<Owner> with_neighbours_together(const Inventory& inventory, Mesh mesh,
                                             PerParameter<Owner> owner);

}  // namespace dmuon::plan
