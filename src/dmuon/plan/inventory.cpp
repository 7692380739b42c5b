#include "dmuon/plan/inventory.h"

#include <map>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

// Keeps every count of bytes, and of all matrices together, inside 64 bits.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 56;

}  // namespace

std::string to_string(const Shape& shape) {
  return core::message(shape.rows, " x ", shape.cols, shape.tensor_parallel ? " over TP" : "");
}

void validate(const Inventory& inventory) {
  core::require(inventory.size() <= static_cast<std::size_t>(kMaxSide),
                "Inventory: expected fewer than 2^31 matrices; got ", inventory.size());
  std::unordered_set<std::string_view> names;
  std::int64_t num_elements = 0;
  for (const Parameter& matrix : inventory) {
    core::require(names.insert(matrix.name).second, "Inventory: matrix '", matrix.name,
                  "' must occur once; it occurs again");
    core::require(
        matrix.rows >= 1 && matrix.rows <= kMaxSide && matrix.cols >= 1 && matrix.cols <= kMaxSide,
        "Inventory: matrix '", matrix.name, "' must have rows and cols in [1, ", kMaxSide,
        "]; got ", matrix.rows, " x ", matrix.cols);
    core::require(matrix.num_matrices == 1, "Inventory: parameter '", matrix.name,
                  "' must be one matrix; got ", matrix.num_matrices);
    core::require(matrix.unit >= 0, "Inventory: matrix '", matrix.name,
                  "' must have a unit >= 0; got ", matrix.unit);
    const std::int64_t left = kMaxElements - num_elements;
    core::require(matrix.num_elements() <= left, "Inventory: matrix '", matrix.name,
                  "' must not take all matrices past ", kMaxElements, " elements; got ",
                  matrix.rows, " x ", matrix.cols);
    num_elements += matrix.num_elements();
  }
}

ShapeGroups group_by_shape(const Inventory& inventory) {
  ShapeGroups groups;
  groups.shape_of.reserve(inventory.size());
  std::map<std::tuple<std::int64_t, std::int64_t, bool>, int> index_of;
  for (const Parameter& matrix : inventory) {
    const auto next = static_cast<int>(groups.shapes.size());
    const Shape shape = matrix.shape();
    const auto [found, is_new] =
        index_of.try_emplace({shape.rows, shape.cols, shape.tensor_parallel}, next);
    if (is_new) {
      groups.shapes.push_back(shape);
      groups.num_matrices.push_back(0);
    }
    ++groups.num_matrices[found->second];
    groups.shape_of.push_back(found->second);
  }
  return groups;
}

std::vector<std::int64_t> elements_of_units(const Inventory& inventory) {
  std::map<int, std::size_t> place_of;
  std::vector<std::int64_t> elements;
  for (const Parameter& matrix : inventory) {
    const auto [found, is_new] = place_of.try_emplace(matrix.unit, elements.size());
    if (is_new) elements.push_back(0);
    elements[found->second] += matrix.num_elements();
  }
  return elements;
}

}  // namespace dmuon::plan
