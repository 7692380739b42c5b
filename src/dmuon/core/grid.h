#pragma once

#include <cstddef>
#include <vector>

namespace dmuon::core {

/// A value for every row and column, row by row in memory.
template <typename T>
class Grid {
 public:
  Grid() = default;
  Grid(int num_rows, int num_columns, const T& value = {})
      : num_columns_(static_cast<std::size_t>(num_columns)),
        values_(static_cast<std::size_t>(num_rows) * num_columns_, value) {}

  T& operator()(int row, int column) { return values_[index(row, column)]; }
  const T& operator()(int row, int column) const { return values_[index(row, column)]; }

 private:
  std::size_t index(int row, int column) const {
    return static_cast<std::size_t>(row) * num_columns_ + static_cast<std::size_t>(column);
  }

  std::size_t num_columns_ = 0;
  std::vector<T> values_;
};

}  // namespace dmuon::core
