#include "dmuon/plan/inventory.h"

#include <map>
#include <string_view>
#include <unordered_set>

#include "dmuon/core/error.h"

namespace dmuon::plan {
namespace {

// Keeps every count of bytes, and of all matrices together, inside 64 bits.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 56;

// Checks how the parameters of a leaf follow each other if they have columns.
class ColumnOrder {
 public:
  // In the inventory's order.
  void add(const Parameter& parameter) {
    if (!parameter.continues) {
      require_whole();
      before_ = nullptr;
      sizes_.clear();
    }
    const bool follows =
        before_ == nullptr
            ? !parameter.column || parameter.column->value() == 0
            : parameter.column.has_value() == before_->column.has_value() &&
                  (!parameter.column || parameter.column->value() == before_->column->value() ||
                   parameter.column->value() == before_->column->value() + 1);
    core::require(follows, "Inventory: parameter '", parameter.name,
                  "' must be of the column of the parameter before it or of the next, the first of "
                  "a leaf of column 0, or no parameter of a leaf of any; got ",
                  parameter.column ? std::to_string(parameter.column->value()) : "none");
    before_ = &parameter;
    if (!parameter.column) return;
    sizes_.resize(static_cast<std::size_t>(parameter.column->value()) + 1);
    sizes_.back() += parameter.num_elements();
  }

  void require_whole() const {
    for (const std::int64_t size : sizes_) {
      core::require(size == sizes_[0], "Inventory: the leaf of parameter '", before_->name,
                    "' must have equally many elements in each column; got ", sizes_[0], " and ",
                    size);
    }
  }

 private:
  const Parameter* before_ = nullptr;  // of the leaf
  std::vector<std::int64_t> sizes_;    // by column
};

void check_heights(const Parameter& parameter) {
  const std::string problem = parameter.view.problem_of_heights();
  core::require(problem.empty(), "Inventory: parameter '", parameter.name, "' must have ", problem);
  core::require(parameter.view.heights.empty() || !parameter.tensor_parallel,
                "Inventory: parameter '", parameter.name,
                "' must have no interleaved rows under tensor parallelism; got ",
                to_string(parameter.shape()));
}

}  // namespace

void validate(const Inventory& inventory) {
  core::require(inventory.values().size() <= std::size_t{kMaxSide},
                "Inventory: expected fewer than 2^31 parameters; got ", inventory.values().size());
  std::unordered_set<std::string_view> names;
  std::int64_t num_elements = 0;
  const Parameter* before = nullptr;
  ColumnOrder columns;
  for (const Parameter& parameter : inventory) {
    core::require(!parameter.continues || (before != nullptr && before->unit == parameter.unit),
                  "Inventory: parameter '", parameter.name,
                  "' must follow a parameter of its unit, which it continues; got ",
                  before == nullptr ? "none before it" : "one of another unit");
    before = &parameter;
    core::require(names.insert(parameter.name).second, "Inventory: parameter '", parameter.name,
                  "' must occur once; it occurs again");
    core::require(parameter.view.rows >= 1 && parameter.view.rows <= kMaxSide &&
                      parameter.view.cols >= 1 && parameter.view.cols <= kMaxSide,
                  "Inventory: parameter '", parameter.name, "' must have rows and cols in [1, ",
                  kMaxSide, "]; got ", parameter.view.rows, " x ", parameter.view.cols);
    core::require(parameter.view.num_matrices >= 1 && parameter.view.num_matrices <= kMaxSide,
                  "Inventory: parameter '", parameter.name, "' must have matrices in [1, ",
                  kMaxSide, "]; got ", parameter.view.num_matrices);
    core::require(parameter.view.column_blocks >= 1 &&
                      parameter.view.cols % parameter.view.column_blocks == 0,
                  "Inventory: parameter '", parameter.name,
                  "' must have column_blocks that divide its ", parameter.view.cols, " cols; got ",
                  parameter.view.column_blocks);
    check_heights(parameter);
    core::require(parameter.unit >= 0, "Inventory: parameter '", parameter.name,
                  "' must have a unit >= 0; got ", parameter.unit);
    const std::int64_t left = kMaxElements - num_elements;
    core::require(parameter.view.rows * parameter.view.cols <= left / parameter.view.num_matrices,
                  "Inventory: parameter '", parameter.name, "' must not take all matrices past ",
                  kMaxElements, " elements; got ", to_string(parameter.shape()));
    num_elements += parameter.num_elements();
    columns.add(parameter);
  }
  columns.require_whole();
}

bool is_continued(const Inventory& inventory, ParameterIndex parameter) {
  const ParameterIndex next(parameter.value() + 1);
  return inventory.contains(next) && inventory[next].continues;
}

ShapeGroups group_by_shape(const Inventory& inventory) {
  ShapeGroups groups;
  std::map<Shape, ShapeIndex> index_of;
  for (const Parameter& matrix : inventory) {
    const auto [found, is_new] =
        index_of.try_emplace(matrix.shape(), ShapeIndex(groups.shapes.size()));
    if (is_new) {
      groups.shapes.push_back(matrix.shape());
      groups.num_matrices.push_back(0);
    }
    ++groups.num_matrices[found->second];
    groups.shape_of.push_back(found->second);
  }
  return groups;
}

core::Vector<UnitIndex, std::vector<ParameterIndex>> group_by_unit(const Inventory& inventory) {
  const PerParameter<UnitIndex> unit_of = units_of(inventory);
  core::Vector<UnitIndex, std::vector<ParameterIndex>> units;
  for (const ParameterIndex w : inventory.indices()) {
    if (!units.contains(unit_of[w])) units.emplace_back();
    units[unit_of[w]].push_back(w);
  }
  return units;
}

PerParameter<UnitIndex> units_of(const Inventory& inventory) {
  PerParameter<UnitIndex> unit_of;
  std::map<int, UnitIndex> index_of;
  for (const Parameter& matrix : inventory) {
    unit_of.push_back(index_of.try_emplace(matrix.unit, UnitIndex(index_of.size())).first->second);
  }
  return unit_of;
}

}  // namespace dmuon::plan
