#pragma once

#include "dmuon/kernels/cuda/machine.h"

namespace dmuon::kernels::cuda::device {

struct Place {
  int row;
  int col;
};

/// Returns place `index` of a lower triangle, row by row: index = row (row + 1) / 2 + col, with
/// col <= row. Index is at least 0 and at most 2^28.
DMUON_DEVICE Place place_in_triangle(int index) {
  const auto before = [](int row) { return row * (row + 1) / 2; };
  // The root is less than row + 2, and not less than row even where it rounds.
  auto row = static_cast<int>(machine::square_root(2 * static_cast<float>(index)));
  while (before(row) > index) --row;
  return {row, index - before(row)};
}

}  // namespace dmuon::kernels::cuda::device
