#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dmuon/balance/instance.h"
#include "dmuon/plan/device.h"
#include "dmuon/plan/inventory.h"

namespace dmuon::plan {

using balance::BatchTime;
using balance::Nanoseconds;

inline double milliseconds(Nanoseconds ns) { return static_cast<double>(ns) / 1e6; }

/// The costs c[s,b] of one shape: times of the *whole* owner path (momentum, Newton-Schulz, update,
/// cast) for a batch (paper, sec:loadbalance).
struct ShapeCosts {
  Shape shape;                     ///< one of Shape::of_costs
  std::vector<BatchTime> batches;  ///< ascending sizes, the first of them 1

  bool operator==(const ShapeCosts&) const = default;
};

/// The times that a plan is based on: measured, modelled or loaded. Plain data.
struct CostTable {
  std::string source;  ///< "measured on NVIDIA H200, ...", "model of a800-sxm4-80gb"
  std::vector<ShapeCosts> shapes;

  bool operator==(const CostTable&) const = default;
};

/// Returns the batch sizes B_s worth measuring, in parameters: powers of two and their middles, up
/// to the number of parameters. A batch of more than one has at most 64 MiB of fp32 input.
std::vector<int> candidate_batches(const Shape& shape, int num_matrices);

/// Returns modelled nanoseconds of the owner path with five Newton-Schulz steps. Over several
/// `tensor_parallel` ranks adds a gather of gradients and a scatter of updates, or, of a shape that
/// is not sharded, the copies of updates.
Nanoseconds modelled_ns(const Device& device, const Shape& shape, int num_batch,
                        int tensor_parallel = 1);

/// Returns candidate batches of every shape with modelled times.
CostTable modelled_costs(const ShapeGroups& groups, const Device& device, int tensor_parallel = 1);

/// Returns measured costs with a modelled exchange among the ranks of tensor parallelism: of the
/// shapes that are not sharded, and of the same shapes where they are, an entry more each. A table
/// that has entries of sharded shapes has the exchange already, and only gets those that it lacks.
CostTable with_exchange(CostTable costs, const Device& device, int tensor_parallel);

/// Returns times of a shape's batches, in ascending sizes: sums over the table's only entries for
/// Shape::of_costs, for the sizes that all of these entries have.
/// @throws InvalidArgument unless there is exactly one entry for each.
std::vector<BatchTime> batch_times(const CostTable& costs, const Shape& shape);

/// Returns the input of balance: one entry a shape of `groups`, in its order, with the number of
/// matrices.
/// @param rule  of update, whose state owners store.
/// @throws InvalidArgument if a shape is missing in the table, is there twice or has no valid
/// batches.
balance::Instance instance_of(const ShapeGroups& groups, const CostTable& costs, int num_owners,
                              std::string_view rule);

/// Returns one JSON object that costs_from_json reads back to an equal table.
std::string to_json(const CostTable& costs);

/// @throws InvalidArgument, naming the place in the text, unless it is a table of this version.
CostTable costs_from_json(std::string_view text);

}  // namespace dmuon::plan
