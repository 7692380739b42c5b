#include "dmuon/layout/parameter.h"

#include <algorithm>
#include <numeric>

#include "dmuon/core/error.h"

namespace dmuon::layout {
namespace {

// Returns the rows of a group, at least 1: texts name heights that nobody has checked.
std::int64_t sum(const std::vector<std::int64_t>& heights) {
  return std::max(std::accumulate(heights.begin(), heights.end(), std::int64_t{0}),
                  std::int64_t{1});
}

// Returns "16*(128 + 64)", or "(128 + 64)" of one group.
std::string interleaved_text(const Shape& shape) {
  const std::int64_t groups = shape.rows / sum(shape.heights);
  std::string text = groups == 1 ? "(" : core::message(groups, "*(");
  for (std::size_t i = 0; i < shape.heights.size(); ++i)
    text += core::message(i == 0 ? "" : " + ", shape.heights[i]);
  return text + ")";
}

}  // namespace

std::vector<Shape> Shape::of_costs() const {
  if (heights.empty()) return {{rows, cols, tensor_parallel, num_matrices}};
  std::vector<Shape> shapes;
  for (const std::int64_t height : heights)
    shapes.push_back({rows / sum(heights) * height, cols, tensor_parallel, num_matrices});
  return shapes;
}

std::vector<RowPart> View::row_parts() const {
  if (heights.empty()) return {{0, rows}};
  std::vector<RowPart> parts;
  std::int64_t first = 0;
  for (const std::int64_t height : heights) {
    parts.push_back({first, height});
    first += height;
  }
  return parts;
}

std::int64_t View::num_groups() const { return heights.empty() ? 1 : rows / sum(heights); }

std::string View::problem_of_heights() const {
  if (heights.empty()) return "";
  std::int64_t left = rows;
  for (const std::int64_t height : heights) {
    if (height < 1 || height > left) {
      return core::message("heights >= 1 that add up to at most its ", rows,
                           " rows; got a height of ", height);
    }
    left -= height;
  }
  if (heights.size() < 2 || rows % (rows - left) != 0) {
    return core::message("two heights or more, whose sum divides its ", rows, " rows; got ",
                         heights.size(), " with a sum of ", rows - left);
  }
  if (column_blocks > 1 || transposed)
    return "no interleaved rows beside blocks of columns or a transposed matrix; got both";
  return "";
}

std::string to_string(const Shape& shape) {
  const std::int64_t stacked = shape.num_matrices / shape.column_blocks;
  const std::string number = stacked == 1 ? "" : core::message(stacked, " of ");
  const std::string rows =
      shape.heights.empty() ? std::to_string(shape.rows) : interleaved_text(shape);
  const std::string blocks =
      shape.column_blocks == 1 ? "" : core::message(shape.column_blocks, '*');
  return core::message(number, rows, " x ", blocks, shape.cols,
                       shape.transposed ? " transposed" : "",
                       shape.tensor_parallel ? " over TP" : "");
}

}  // namespace dmuon::layout
