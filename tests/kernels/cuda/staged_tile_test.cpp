#include "dmuon/kernels/cuda/staged_tile.h"

#include <gtest/gtest.h>

#include <set>

namespace dmuon::kernels::cuda::device {
namespace {

// Chunks of 16 bytes that are loaded together must lie in different eighths of the 32 banks.
template <int kTile, typename ChunkOf>
std::size_t eighths(const ChunkOf& chunk_of) {
  std::set<int> found;
  for (int i = 0; i < 8; ++i) {
    const auto [row, col] = chunk_of(i);
    found.insert(StagedTile<kTile, 128>::word_of(row, col) / 4 % 8);
  }
  return found.size();
}

template <int kTile>
void expect_no_conflicts() {
  std::set<int> words;
  for (int row = 0; row < kTile; ++row) {
    for (int col = 0; col < kTile; col += 8) {
      words.insert(StagedTile<kTile, 128>::word_of(row, col));
      if (col % 64 == 0) {
        EXPECT_EQ(eighths<kTile>([&](int i) { return Place{row, col + 8 * i}; }), 8U);
      }
      if (row % 8 == 0) {
        EXPECT_EQ(eighths<kTile>([&](int i) { return Place{row + i, col}; }), 8U);
      }
      if (row % 32 < 8 && row % 2 == 0) {
        EXPECT_EQ(eighths<kTile>([&](int i) { return Place{row + i / 2 * 8 + i % 2, col}; }), 8U);
      }
    }
  }
  EXPECT_EQ(words.size(), static_cast<std::size_t>(kTile * kTile / 8));  // no two chunks at a place
}

TEST(StagedTile, LoadsAndStoresReachAllBanks) {
  expect_no_conflicts<64>();
  expect_no_conflicts<128>();
}

}  // namespace
}  // namespace dmuon::kernels::cuda::device
