#pragma once

#include <cstdint>

#include "dmuon/layout/mesh.h"
#include "dmuon/plan/inventory.h"

namespace dmuon::plan {

/// In elements; 1 MB in 16 bits. A smaller message takes about as long as an empty one, and the
/// host's work for a part does not depend on its size.
inline constexpr std::int64_t kSmallestPart = std::int64_t{1} << 19;

/// Divides large stacks (several matrices of one shape: experts, heads) between owners. Pure
/// function, deterministic.
/// - A part has at most 1/8 of an owner's share of all work, but at least one matrix (whose blocks
///   of columns stay together) and at least `smallest_part` elements.
/// - Parts of a stack are equal, as few as suffice, and follow each other. Matrices [a, b) of
///   `name` are "name[a:b]".
/// - A parameter that has parts already is not divided, unless it belongs to a single column of the
///   mesh. Nor is one with only one possible owner.
/// @param smallest_part  >= 1.
/// @throws InvalidArgument as validate, and for a smallest_part < 1.
Inventory divide(const Inventory& inventory, Mesh mesh, std::int64_t smallest_part = kSmallestPart);

/// Reverses divide(): neighbouring parts of a leaf, of equal shapes and one column, become one
/// parameter again, under the leaf's name if they are all of it. Pure function.
Inventory join(const Inventory& inventory);

/// Exchanges owners among equal parts of a leaf (of one column if they have columns). Afterwards
/// the parts of one owner follow each other, and so do the owners of one column, so that they
/// travel as one message. Loads do not change. Pure function.
PerParameter<Owner> with_neighbours_together(const Inventory& inventory, Mesh mesh,
                                             PerParameter<Owner> owner);

}  // namespace dmuon::plan
