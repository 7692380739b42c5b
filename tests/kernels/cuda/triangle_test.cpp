#include "dmuon/kernels/cuda/triangle.h"

#include <gtest/gtest.h>

namespace dmuon::kernels::cuda::device {
namespace {

TEST(Triangle, GoesRowByRow) {
  int index = 0;
  for (int row = 0; row < 2000; ++row) {
    for (int col = 0; col <= row; ++col, ++index) {
      const Place place = place_in_triangle(index);
      ASSERT_EQ(place.row, row) << index;
      ASSERT_EQ(place.col, col) << index;
    }
  }
}

TEST(Triangle, HoldsAtTheEndsOfLongRows) {
  for (int row = 2000; row < 23170; ++row) {
    const int begin = row * (row + 1) / 2;
    const Place first = place_in_triangle(begin);
    const Place last = place_in_triangle(begin + row);
    ASSERT_TRUE(first.row == row && first.col == 0 && last.row == row && last.col == row) << row;
  }
}

}  // namespace
}  // namespace dmuon::kernels::cuda::device
