#include "dmuon/balance/instance.h"

#include "dmuon/core/error.h"

namespace dmuon::balance {
namespace {

void validate(const CostedShape& shape, ShapeIndex index) {
  const auto where = core::message("balance: shapes[", index, "]");
  core::require(shape.num_matrices >= 0, where, ".num_matrices must be >= 0; got ",
                shape.num_matrices);
  core::require(shape.bytes >= 0, where, ".bytes must be >= 0; got ", shape.bytes);
  core::require(!shape.batches.empty() && shape.batches.front().size == 1, where,
                ".batches must begin with a batch of 1 matrix; got ",
                shape.batches.empty() ? 0 : shape.batches.front().size);
  int previous = 0;
  for (const BatchTime& batch : shape.batches) {
    core::require(batch.size > previous, where, ".batches must have ascending sizes; got ",
                  batch.size, " after ", previous);
    core::require(batch.ns >= 0 && batch.ns <= kMaxTotalNs, where, ".batches: a batch of ",
                  batch.size, " must take from 0 to ", kMaxTotalNs, " ns; got ", batch.ns);
    previous = batch.size;
  }
}

}  // namespace

void validate(const Instance& instance) {
  core::require(instance.num_owners >= 1, "balance: num_owners must be >= 1; got ",
                instance.num_owners);
  core::require(instance.max_bytes >= 0, "balance: max_bytes must be >= 0; got ",
                instance.max_bytes);
  Wide total = 0;
  Wide total_bytes = 0;
  for (const ShapeIndex s : instance.shapes.indices()) {
    const CostedShape& shape = instance.shapes[s];
    validate(shape, s);
    // Counts single matrices: the cheapest batches take no more.
    total += static_cast<Wide>(shape.batches.front().ns) * shape.num_matrices;
    total_bytes += static_cast<Wide>(shape.bytes) * shape.num_matrices;
  }
  core::require(total_bytes <= kMaxTotalNs,
                "balance: the bytes of all matrices must add up to at most ", kMaxTotalNs, "; got ",
                static_cast<double>(total_bytes));
  core::require(total <= kMaxTotalNs, "balance: the times of all matrices must add up to at most ",
                kMaxTotalNs, " ns (", kMaxTotalNs / 1'000'000'000, " s); got ",
                static_cast<double>(total));
}

}  // namespace dmuon::balance
