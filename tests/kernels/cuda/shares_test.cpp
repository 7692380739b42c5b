#include "dmuon/kernels/cuda/shares.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace dmuon::kernels::cuda::device {
namespace {

using Tile = std::pair<int, int>;         // matrix, tile
using Piece = std::tuple<int, int, int>;  // first, last, part
using Pieces = std::map<Tile, std::vector<Piece>>;

// The shares of all workers, by tile, in the order of their steps.
Pieces pieces(const SharesOf& of, int num_workers) {
  Pieces found;
  for (int worker = 0; worker < num_workers; ++worker) {
    Shares shares(of, worker, num_workers);
    while (shares.next()) {
      const Share share = shares.share();
      EXPECT_EQ(shares.num_steps(), share.last - share.first);
      found[{share.matrix, share.tile}].emplace_back(share.first, share.last, share.part);
      EXPECT_LT(share.part, share.num_parts);
    }
  }
  for (auto& [tile, parts] : found) std::ranges::sort(parts);
  return found;
}

// Calls with every division of up to six tiles into whole ones and runs.
template <typename Check>
void for_each_division(const Check& check) {
  for (const int tiles : {1, 2, 3, 6}) {
    for (int whole = 0; whole <= tiles; ++whole) {
      for (const int steps : {1, 2, 7}) {
        const int cut = tiles - whole;
        for (int runs = cut == 0 ? 0 : 1; runs <= cut * steps; ++runs) {
          const SharesOf of{2, tiles, whole, runs, steps};
          SCOPED_TRACE(testing::Message() << tiles << " tiles, " << whole << " whole, " << runs
                                          << " runs, " << steps << " steps");
          check(of);
          if (cut == 0) break;
        }
      }
    }
  }
}

TEST(Shares, HaveEachStepOfEachTileOnce) {
  for_each_division([](const SharesOf& of) {
    const Pieces all = pieces(of, 3);
    ASSERT_EQ(all.size(), static_cast<std::size_t>(of.batch * of.num_tiles));
    for (const auto& [tile, parts] : all) {
      int at = 0;
      int part = 0;
      for (const auto& [first, last, number] : parts) {
        EXPECT_EQ(first, at);
        EXPECT_GT(last, first);
        EXPECT_EQ(number, part++);
        at = last;
      }
      EXPECT_EQ(at, of.num_steps);
      if (tile.second < of.num_whole) {
        EXPECT_EQ(parts.size(), 1U);
      }
    }
  });
}

TEST(Shares, CountTheirPartsAlike) {
  for_each_division([](const SharesOf& of) {
    const Pieces all = pieces(of, 2);
    Shares shares(of, 0, 1);
    while (shares.next()) {
      const Share share = shares.share();
      EXPECT_EQ(static_cast<std::size_t>(share.num_parts),
                all.at({share.matrix, share.tile}).size());
    }
  });
}

TEST(Shares, OfAMatrixDependNeitherOnTheBatchNorOnTheWorkers) {
  for_each_division([](SharesOf of) {
    const Pieces two = pieces(of, 5);
    of.batch = 1;
    for (const auto& [tile, parts] : pieces(of, 2)) {
      EXPECT_EQ(parts, two.at(tile));
      EXPECT_EQ(parts, two.at({1, tile.second}));
    }
  });
}

TEST(Shares, GiveEachWorkerAsManyStepsWhereEachHasARun) {
  const SharesOf of{1, 36, 0, 66, 32};  // 2048 rows on an H200
  std::vector<int> steps(66);
  for (int worker = 0; worker < 66; ++worker) {
    Shares shares(of, worker, 66);
    while (shares.next()) steps[static_cast<std::size_t>(worker)] += shares.num_steps();
  }
  EXPECT_EQ(std::ranges::min(steps), 17);
  EXPECT_EQ(std::ranges::max(steps), 18);
}

}  // namespace
}  // namespace dmuon::kernels::cuda::device
