#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "dmuon/kernels/cuda/machine.h"
#include "tests/kernels/cuda/emulator/tiles.h"

// Clusters, mbarriers, and how tiles' copies and multiplications are ordered, in the emulator.
// Planted bugs are found.
namespace dmuon::kernels::cuda {
namespace {

using emulator::Access;
using emulator::Buffer;
using emulator::Grid;

std::string run(const Grid& grid, const std::vector<Buffer>& buffers,
                const std::function<void()>& block_thread, unsigned seed) {
  std::string all;
  for (const std::string& sentence : emulator::run(grid, buffers, block_thread, seed))
    all += sentence + "\n";
  return all;
}

enum class Bug {
  kNone,
  kNoWaitForFull,
  kOneWarpWaitsForFull,
  kNoWaitForEmpty,
  kNoRelease,
  kReleasesItsOwnBlock,
  kReleasesTooEarly,
  kReleasesTwice,
  kFullHasTheOtherParity,
  kEmptyHasTheOtherParity,
  kNoExpectation,
  kExpectsLess,
  kExpectsMore,
  kCopiesToItselfAlone,
  kCopiesToTheOthersHalf,
  kNoFenceAfterInit,
  kNoBarrierAfterInit,
  kLeavesItsCluster,
  kNoWgmmaFence,
  kNoCommit,
  kNoWgmmaWait,
  kWaitsForAGroupLess,
  kReadsSumsInFlight,
  kTouchesSumsInFlight,
  kStoresAnOperand,
  kStoresToAnMbarrier,
  kOneWarpDoesNotMultiply,
};

// A cluster of two blocks multiplies: 64 rows of `a` for each block by 128 rows of `b`, of which
// each block fetches a half for both, in steps of 64 of the inner dimension through two stages.
struct Ring {
  static constexpr int kSteps = 5;
  static constexpr int kInner = kSteps * 64;
  static constexpr int kOperand = 64 * 32;  // words of 64 rows
  static constexpr int kStage = 3 * kOperand;
  static constexpr int kFull = 2 * kStage;
  static constexpr int kEmpty = kFull + 4;
  static constexpr unsigned kSharedBytes = 4 * (kEmpty + 4);

  std::vector<std::uint16_t> a = std::vector<std::uint16_t>(2 * 128 * kInner);  // two clusters
  std::vector<std::uint16_t> b = std::vector<std::uint16_t>(128 * kInner);
  std::vector<float> out = std::vector<float>(2 * 128 * 128);
  alignas(64) TensorMap a_map = map_of(a, 256);
  alignas(64) TensorMap b_map = map_of(b, 128);

  Ring() {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = small(i * 5 + i / kInner);
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = small(i * 3 + i / kInner);
  }
  static std::uint16_t small(std::size_t i) {
    return machine::f16_of(static_cast<float>(i % 13) - 6);
  }
  static TensorMap map_of(const std::vector<std::uint16_t>& x, std::uint64_t rows) {
    return emulator::TiledMap{.base = reinterpret_cast<const char*>(x.data()),
                              .cols = kInner,
                              .rows = rows,
                              .row_pitch = 2 * kInner,
                              .tile_rows = 64}
        .encoded();
  }

  void fetch(Bug bug) const {
    const int rank = machine::cluster_rank();
    for (int step = 0; step < kSteps; ++step) {
      const int stage = step % 2;
      const int full = kFull + 2 * stage;
      const auto parity = static_cast<unsigned>((step / 2 & 1) ^ 1);
      if (bug != Bug::kNoWaitForEmpty)
        machine::mbarrier_wait(kEmpty + 2 * stage,
                               bug == Bug::kEmptyHasTheOtherParity ? parity ^ 1 : parity);
      const unsigned operands = bug == Bug::kExpectsLess ? 2 : bug == Bug::kExpectsMore ? 4 : 3;
      if (bug != Bug::kNoExpectation) machine::mbarrier_expect(full, 4 * operands * kOperand);
      machine::copy_tile(stage * kStage, a_map, full, step * 64, machine::block_x() * 64, 0);
      const int half = bug == Bug::kCopiesToTheOthersHalf ? 1 - rank : rank;
      const int to = stage * kStage + (1 + half) * kOperand;
      if (bug == Bug::kCopiesToItselfAlone) {
        machine::copy_tile(to, b_map, full, step * 64, rank * 64, 0);
      } else {
        machine::copy_tile_to_both(to, b_map, full, step * 64, rank * 64, 0);
      }
    }
  }

  static void release(int step, Bug bug) {
    if (machine::thread() % 128 != 0 || bug == Bug::kNoRelease) return;
    for (int rank = 0; rank < 2; ++rank) {
      const int to = bug == Bug::kReleasesItsOwnBlock ? machine::cluster_rank() : rank;
      machine::mbarrier_arrive(kEmpty + 2 * (step % 2), to);
    }
    if (bug == Bug::kReleasesTwice) machine::mbarrier_arrive(kEmpty + 2 * (step % 2), 0);
  }

  void multiply_step(float (&sums)[64], int step, Bug bug) const {
    const int stage = step % 2 * kStage;
    const auto parity = static_cast<unsigned>(step / 2 & 1);
    const bool waits = bug != Bug::kOneWarpWaitsForFull || machine::thread() < 32;
    if (bug != Bug::kNoWaitForFull && waits)
      machine::mbarrier_wait(kFull + 2 * (step % 2),
                             bug == Bug::kFullHasTheOtherParity ? parity ^ 1 : parity);
    if (bug == Bug::kStoresAnOperand && machine::thread() == 5) machine::shared_store(stage, 0);
    if (bug == Bug::kStoresToAnMbarrier) machine::shared_store(kFull, 0);
    if (bug == Bug::kOneWarpDoesNotMultiply && machine::thread() < 32) return;
    if (bug != Bug::kNoWgmmaFence) machine::wgmma_fence();
    for (unsigned k = 0; k < 4; ++k) {
      machine::multiply_64x128_f16(sums, machine::matrix_descriptor(stage) + 2 * k,
                                   machine::matrix_descriptor(stage + kOperand) + 2 * k,
                                   step > 0 || k > 0);
    }
    if (bug != Bug::kNoCommit) machine::wgmma_commit();
    if (bug == Bug::kTouchesSumsInFlight) sums[7] = 0;
    if (bug == Bug::kReleasesTooEarly) {
      release(step, bug);
    } else if (bug != Bug::kWaitsForAGroupLess) {
      machine::wgmma_wait<1>();
    }
    if (bug != Bug::kReleasesTooEarly && step > 0) release(step - 1, bug);
  }

  void multiply(Bug bug) {
    float sums[64];
    for (int step = 0; step < kSteps; ++step) multiply_step(sums, step, bug);
    if (bug == Bug::kReadsSumsInFlight) machine::f16_of(2 * sums[3]);
    if (bug != Bug::kNoWgmmaWait) machine::wgmma_wait<0>();
    if (bug != Bug::kReleasesTooEarly) release(kSteps - 1, bug);
    const int t = machine::thread();
    for (int i = 0; i < 64; ++i) {
      const int row = machine::block_x() * 64 + t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
      machine::store_f32(out.data() + row * 128 + i / 4 * 8 + t % 4 * 2 + i % 2, sums[i]);
    }
  }

  void block_thread(Bug bug) {
    if (machine::thread() == 0) {
      for (int stage = 0; stage < 2; ++stage) {
        machine::mbarrier_init(kFull + 2 * stage, 1);
        machine::mbarrier_init(kEmpty + 2 * stage, 2);
      }
      if (bug != Bug::kNoFenceAfterInit) machine::mbarrier_init_fence();
    }
    if (bug == Bug::kNoBarrierAfterInit) {
      machine::barrier();
    } else {
      machine::cluster_barrier();
    }
    if (machine::thread() >= 128) {
      machine::give_registers<40>();
      if (machine::thread() == 128) fetch(bug);
    } else {
      machine::take_registers<232>();
      multiply(bug);
    }
    if (bug != Bug::kLeavesItsCluster) machine::cluster_barrier();
  }

  std::vector<float> product() const {
    const auto wide = [](const std::vector<std::uint16_t>& x) {
      std::vector<float> all;
      for (const std::uint16_t v : x) all.push_back(machine::float_of_f16(v));
      return all;
    };
    const std::vector<float> wide_a = wide(a);
    const std::vector<float> wide_b = wide(b);
    std::vector<float> sums;
    for (std::size_t row = 0; row < 256; ++row) {
      for (std::size_t col = 0; col < 128; ++col) {
        sums.push_back(std::inner_product(&wide_a[row * kInner], &wide_a[row * kInner] + kInner,
                                          &wide_b[col * kInner], 0.F));
      }
    }
    return sums;
  }

  std::string found(Bug bug, unsigned seed) {
    const auto buffer = [](const char* name, const auto& x, Access access) {
      return Buffer{
          .name = name, .base = x.data(), .row_bytes = x.size() * sizeof x[0], .access = access};
    };
    return run(
        {.x = 4, .threads = 256, .shared_bytes = kSharedBytes, .cluster = 2, .registers = 136},
        {buffer("a", a, Access::kRead), buffer("b", b, Access::kRead),
         buffer("out", out, Access::kWrite)},
        [this, bug] { block_thread(bug); }, seed);
  }
};

TEST(Cluster, MultipliesInEveryOrder) {
  for (unsigned seed = 1; seed <= 4; ++seed) {
    Ring ring;
    EXPECT_EQ(ring.found(Bug::kNone, seed), "");
    EXPECT_TRUE(ring.out == ring.product());
  }
}

// In any order of threads, because what is found is that nothing orders them.
TEST(Cluster, FindsEachPlantedBug) {
  const std::pair<Bug, const char*> bugs[] = {
      {Bug::kNoWaitForFull, "multiplication of shared word"},
      {Bug::kOneWarpWaitsForFull, "has not waited for"},
      {Bug::kNoWaitForEmpty, "more threads arrive at the mbarrier"},
      {Bug::kNoRelease, "deadlock"},
      {Bug::kReleasesItsOwnBlock, "overwrites shared word"},
      {Bug::kReleasesTooEarly, "overwrites shared word"},
      {Bug::kReleasesTwice, "overwrites shared word"},
      {Bug::kFullHasTheOtherParity, "multiplication of shared word"},
      {Bug::kEmptyHasTheOtherParity, "deadlock"},
      {Bug::kNoExpectation, "deadlock"},
      {Bug::kExpectsLess, "while a copy to it is in flight"},
      {Bug::kExpectsMore, "deadlock"},
      {Bug::kCopiesToItselfAlone, "deadlock"},
      {Bug::kNoFenceAfterInit, "no fence after the initialisation"},
      {Bug::kNoBarrierAfterInit, "the mbarrier at shared word"},
      {Bug::kLeavesItsCluster, "ended"},
      {Bug::kNoWgmmaFence, "no wgmma_fence followed"},
      {Bug::kNoCommit, "loaded by a multiplication"},
      {Bug::kNoWgmmaWait, "ends with multiplications in flight"},
      {Bug::kWaitsForAGroupLess, "overwrites shared word"},
      {Bug::kReadsSumsInFlight, "sums that a multiplication was still changing"},
      {Bug::kTouchesSumsInFlight, "sums were touched while"},
      {Bug::kStoresAnOperand, "without a fence between them"},
      {Bug::kStoresToAnMbarrier, "which is an mbarrier"},
      {Bug::kOneWarpDoesNotMultiply, "deadlock"},
  };
  for (const auto& [bug, words] : bugs) {
    for (unsigned seed = 1; seed <= 2; ++seed) {
      const std::string all = Ring().found(bug, seed);
      EXPECT_NE(all.find(words), std::string::npos) << words << "; seed " << seed << " found:\n"
                                                    << all;
    }
  }
}

// Block 1 arrives at an mbarrier of block 0, which ends much later, but knows of the arrival only
// if it waits for it.
std::string arrives(bool waits) {
  const auto block_thread = [waits] {
    const bool first = machine::thread() == 0;
    if (first) {
      machine::mbarrier_init(0, 1);
      machine::mbarrier_init_fence();
    }
    machine::cluster_barrier();
    if (machine::cluster_rank() == 1) {
      if (first) machine::mbarrier_arrive(0, 0);
      return;
    }
    for (int i = 0; i < 20; ++i) machine::barrier();
    if (waits) machine::mbarrier_wait(0, 0);
  };
  return run({.x = 2, .threads = 32, .shared_bytes = 16, .cluster = 2}, {}, block_thread, 1);
}

TEST(Cluster, KnowsThatNothingWillArriveBeforeItEnds) {
  EXPECT_EQ(arrives(true), "");
  EXPECT_NE(arrives(false).find("may have ended when this arrives"), std::string::npos);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
