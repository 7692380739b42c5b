#include "dmuon/plan/workspace.h"

#include <algorithm>

#include "dmuon/flops/newton_schulz.h"
#include "dmuon/plan/state_bytes.h"

namespace dmuon::plan {
namespace {

constexpr std::int64_t kUpdateBytes = 4;  // fp32

// CPUs update one matrix after the other from this short side on. A rank's threads decide how many
// smaller ones go together (newton_schulz/products/cpu.cpp), so a plan counts them all.
constexpr std::int64_t kLeastSideAlone = 256;

// optim::BatchUpdate gathers interleaved rows of momentum and gradient, then of weights and a
// second moment.
constexpr std::int64_t kGatheredBytes = 8;

// @param gathered  bytes an element that are gathered.
std::int64_t bytes_of_matrices(const Shape& given, std::size_t num_batch,
                               const PlanOptions& options, int tensor_parallel,
                               std::int64_t gathered) {
  // Accelerators pad the iteration's 16-bit matrices (newton_schulz/elementwise/aten.cpp).
  const auto padded = [&](std::int64_t length) {
    return options.on_cpu || options.ns_bytes != 2 ? length : (length + 7) / 8 * 8;
  };
  Shape shape = given;
  shape.rows = padded(given.rows);
  shape.cols = padded(given.cols);
  const std::int64_t side = std::min(shape.rows, shape.cols);
  const auto cost = [&](flops::Form form) {
    return flops::orthogonalisation(shape.rows, shape.cols, options.ns_steps, form, {});
  };
  const bool gram = cost(flops::Form::kGram) < cost(flops::Form::kDirect);
  const auto form = gram ? flops::Form::kGram : flops::Form::kDirect;
  // On CPUs the segmented form takes the Gram form's place in 16 bits.
  const bool wide = gram && options.on_cpu && options.ns_bytes == 2;
  const std::int64_t squares = shape.num_matrices * side * side *
                               flops::squares(flops::segments(options.ns_steps, form)) *
                               (wide ? flops::kWideSquareBytes : options.ns_bytes);
  // The direction is freed before the iterate gets a spare. Blocks of columns are first copied
  // apart.
  const std::int64_t copied = shape.column_blocks > 1 ? kUpdateBytes : 0;
  const std::int64_t before =
      kUpdateBytes * given.num_elements() +
      std::max(copied * given.num_elements(), options.ns_bytes * shape.num_elements());
  const std::int64_t changed = rule_update_bytes(options.rule) * given.num_elements();
  const std::int64_t iteration = 2 * shape.num_elements() * options.ns_bytes + squares + changed;
  // With tensor parallelism two batches travel at once: each has directions as they are sent and
  // received, then results likewise. If a matrix is not cut, each rank has its direction already,
  // and gets a copy of its result.
  const bool travels = given.tensor_parallel || tensor_parallel > 1;
  const std::int64_t copied_out = std::int64_t{2} * (tensor_parallel + 1) * options.ns_bytes;
  const std::int64_t cut = 4 * (kUpdateBytes + options.ns_bytes);
  const std::int64_t exchange =
      travels ? (given.tensor_parallel ? cut : copied_out) * given.num_elements() : 0;
  const std::int64_t all =
      static_cast<std::int64_t>(num_batch) *
      (std::max(before, iteration) + exchange + gathered * given.num_elements());
  if (!options.on_cpu || travels || side < kLeastSideAlone) return all;
  return all / std::max<std::int64_t>(1, static_cast<std::int64_t>(num_batch) * shape.num_matrices);
}

}  // namespace

std::int64_t workspace_bytes(const Shape& shape, std::size_t num_batch, const PlanOptions& options,
                             int tensor_parallel) {
  if (shape.heights.empty())
    return bytes_of_matrices(shape, num_batch, options, tensor_parallel, 0);
  // CPUs update one part after the other.
  std::int64_t bytes = 0;
  for (const Shape& part : shape.of_costs()) {
    const std::int64_t own =
        bytes_of_matrices(part, num_batch, options, tensor_parallel, kGatheredBytes);
    bytes = options.on_cpu ? std::max(bytes, own) : bytes + own;
  }
  return bytes;
}

}  // namespace dmuon::plan
