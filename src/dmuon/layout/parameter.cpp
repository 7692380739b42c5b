#include "dmuon/layout/parameter.h"

#include "dmuon/core/error.h"

namespace dmuon::layout {

std::string to_string(const Shape& shape) {
  const std::int64_t stacked = shape.num_matrices / shape.column_blocks;
  const std::string number = stacked == 1 ? "" : core::message(stacked, " of ");
  const std::string blocks =
      shape.column_blocks == 1 ? "" : core::message(shape.column_blocks, '*');
  return core::message(number, shape.rows, " x ", blocks, shape.cols,
                       shape.transposed ? " transposed" : "",
                       shape.tensor_parallel ? " over TP" : "");
}

}  // namespace dmuon::layout
