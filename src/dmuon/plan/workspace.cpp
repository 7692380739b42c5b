#include "dmuon/plan/workspace.h"

#include <algorithm>

#include "dmuon/flops/newton_schulz.h"

namespace dmuon::plan {
namespace {

constexpr std::int64_t kUpdateBytes = 4;  // fp32

// Square matrices of the iteration (iteration.cpp): R and Z, in the Gram form Q and a spare one
// too; of CPUs' segmented form in 16 bits these are in fp32 and 16 bits (WideSquare).
constexpr std::int64_t kSquares[] = {2, 4};
constexpr std::int64_t kWideBytes = 4 + 2;

}  // namespace

std::int64_t workspace_bytes(const Shape& shape, std::size_t num_batch,
                             const PlanOptions& options) {
  const std::int64_t side = std::min(shape.rows, shape.cols);
  const auto cost = [&](flops::Form form) {
    return flops::orthogonalisation(shape.rows, shape.cols, options.ns_steps, form, {});
  };
  const bool gram = cost(flops::Form::kGram) < cost(flops::Form::kDirect);
  const bool wide = gram && options.on_cpu && options.ns_bytes == 2;
  const std::int64_t squares = shape.num_matrices * kSquares[gram ? 1 : 0] * side * side *
                               (wide ? kWideBytes : options.ns_bytes);
  // The update is gone when the iterate gets a spare. Blocks of columns are first copied apart.
  const std::int64_t copied = shape.column_blocks > 1 ? kUpdateBytes : 0;
  const std::int64_t before =
      (kUpdateBytes + std::max<std::int64_t>(copied, options.ns_bytes)) * shape.num_elements();
  const std::int64_t iteration = 2 * shape.num_elements() * options.ns_bytes + squares;
  return static_cast<std::int64_t>(num_batch) * std::max(before, iteration);
}

}  // namespace dmuon::plan
