#include "tests/kernels/cuda/emulator/emulator.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "dmuon/kernels/cuda/machine.h"

// Kernels with planted bugs: each is found.
namespace dmuon::kernels::cuda {
namespace {

using emulator::Access;
using emulator::Buffer;

constexpr unsigned kThreads = 64;
constexpr unsigned kBlocks = 5;

enum class Bug {
  kNone,
  kNoBarrier,
  kNoSecondBarrier,
  kNoFence,
  kFenceBeforeTheSum,
  kNoAcquire,
  kBarrierOfOneWarp,
  kUnwrittenWord,
  kWordPastTheEnd,
};

// Sums of 64 floats a block, then of all blocks by the last one: what kernels of norms do.
struct Sums {
  std::vector<float> in = std::vector<float>(kThreads * kBlocks, 1);
  std::vector<float> partial = std::vector<float>(kBlocks);
  std::vector<float> out = std::vector<float>(1);
  std::vector<std::uint32_t> ticket = std::vector<std::uint32_t>(1);

  static float of_warp(float v) {
    for (int mask = 16; mask > 0; mask /= 2) {
      v += machine::float_of(machine::shuffle_xor(machine::bits_of(v), mask));
    }
    return v;
  }

  static float of_block(float v, Bug bug) {
    const int t = machine::thread();
    v = of_warp(v);
    if (t % 32 == 0) machine::shared_store(t / 32, machine::bits_of(v));
    if (bug == Bug::kBarrierOfOneWarp && t >= 32) return 0;
    if (bug != Bug::kNoBarrier) machine::barrier();
    const int second = bug == Bug::kUnwrittenWord ? 2 : bug == Bug::kWordPastTheEnd ? 4 : 1;
    const float sum = machine::float_of(machine::shared_load(0)) +
                      machine::float_of(machine::shared_load(second));
    if (bug != Bug::kNoSecondBarrier) machine::barrier();
    return sum;
  }

  void block_thread(Bug bug) {
    const int t = machine::thread();
    const int block = machine::block_x();
    const float sum =
        of_block(machine::load_f32(in.data() + block * static_cast<int>(kThreads) + t), bug);
    if (t == 0) {
      if (bug == Bug::kFenceBeforeTheSum) machine::fence();
      machine::store_f32(partial.data() + block, sum);
      if (bug != Bug::kNoFence && bug != Bug::kFenceBeforeTheSum) machine::fence();
      const std::uint32_t before = machine::atomic_add(ticket.data(), 1);
      if (bug != Bug::kNoAcquire) machine::fence();
      machine::shared_store(0, before);
    }
    machine::barrier();
    if (machine::shared_load(0) != kBlocks - 1) return;
    machine::barrier();
    float all = t < static_cast<int>(kBlocks) ? machine::load_f32_l2(partial.data() + t) : 0;
    all = of_block(all, Bug::kNone);
    if (t == 0) machine::store_f32(out.data(), all);
  }

  std::vector<std::string> run(Bug bug, unsigned seed) {
    const std::vector<Buffer> buffers{
        {.name = "in", .base = in.data(), .row_bytes = in.size() * 4, .access = Access::kRead},
        {.name = "partial",
         .base = partial.data(),
         .row_bytes = kBlocks * 4,
         .access = Access::kChanges},
        {.name = "out", .base = out.data(), .row_bytes = 4, .access = Access::kWrite},
        {.name = "ticket", .base = ticket.data(), .row_bytes = 4, .access = Access::kChanges}};
    return emulator::run(
        {.x = kBlocks, .threads = kThreads, .shared_bytes = 16}, buffers,
        [&] { block_thread(bug); }, seed);
  }
};

std::string joined(const std::vector<std::string>& sentences) {
  std::string all;
  for (const std::string& sentence : sentences) all += sentence + "\n";
  return all;
}

TEST(Emulator, AddsUpInEveryOrder) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Sums sums;
    std::iota(sums.in.begin(), sums.in.end(), 0.0F);
    EXPECT_EQ(joined(sums.run(Bug::kNone, seed)), "");
    EXPECT_EQ(sums.out[0], 320 * 319 / 2);
  }
}

TEST(Emulator, FindsEachPlantedBug) {
  const std::pair<Bug, const char*> bugs[] = {
      {Bug::kNoBarrier, "race: loads shared word"},
      {Bug::kNoSecondBarrier, "race: overwrites shared word"},
      {Bug::kNoFence, "race: loads partial"},
      {Bug::kFenceBeforeTheSum, "race: loads partial"},
      {Bug::kNoAcquire, "race: loads partial"},
      {Bug::kBarrierOfOneWarp, "deadlock"},
      {Bug::kUnwrittenWord, "which nobody wrote"},
      {Bug::kWordPastTheEnd, "shared word 4, of 4"},
  };
  for (const auto& [bug, words] : bugs) {
    std::string all;
    for (unsigned seed = 1; seed <= 3; ++seed) all += joined(Sums().run(bug, seed));
    EXPECT_NE(all.find(words), std::string::npos) << words << "; found:\n" << all;
  }
}

// Two matrices of 3 rows of 4 floats, with one float between rows.
struct Matrices {
  std::vector<float> entries = std::vector<float>(64);

  std::string run(Access access, const std::function<void(float*)>& first_thread) {
    const std::vector<Buffer> buffers{{.name = "x",
                                       .base = entries.data(),
                                       .row_bytes = 16,
                                       .rows = 3,
                                       .row_pitch = 20,
                                       .batch = 2,
                                       .batch_pitch = 80,
                                       .access = access}};
    return joined(emulator::run(
        {}, buffers,
        [&] {
          if (machine::thread() == 0) first_thread(entries.data());
        },
        1));
  }
};

TEST(Emulator, FindsAccessesBesideTheRows) {
  const auto load = [](int i) { return [=](float* x) { machine::load_f32(x + i); }; };
  for (const int inside : {0, 3, 5, 13, 20, 33})
    EXPECT_EQ(Matrices().run(Access::kRead, load(inside)), "");
  for (const int beside : {4, 9, 14, 15, 24, 34}) {
    EXPECT_NE(Matrices().run(Access::kRead, load(beside)).find("between its rows or past its end"),
              std::string::npos)
        << beside;
  }
  EXPECT_NE(Matrices().run(Access::kRead, load(100000)).find("in no buffer"), std::string::npos);
}

TEST(Emulator, FindsUnalignedAccesses) {
  float v[4];
  EXPECT_NE(Matrices()
                .run(Access::kRead, [&](float* x) { machine::load_f32x4(v, x + 5); })
                .find("not aligned"),
            std::string::npos);
}

TEST(Emulator, FindsBytesThatAreWrittenTwiceOrNever) {
  const auto store = [](float* x) { machine::store_f32(x, 1); };
  EXPECT_NE(Matrices().run(Access::kWrite, store).find("92 bytes of x were never written"),
            std::string::npos);
  EXPECT_NE(Matrices()
                .run(Access::kWrite,
                     [&](float* x) {
                       store(x);
                       store(x);
                     })
                .find("written twice"),
            std::string::npos);
  EXPECT_NE(Matrices().run(Access::kRead, store).find("only reads"), std::string::npos);
}

TEST(Emulator, ConvertsAsAGpuDoes) {
  EXPECT_EQ(machine::f16_of(65504), 0x7bff);
  EXPECT_EQ(machine::f16_of(65520), 0x7c00);
  EXPECT_EQ(machine::f16_of(0x1p-25F), 0);
  EXPECT_EQ(machine::f16_of(1 + 0x1p-11F), 0x3c00);  // to even
  EXPECT_EQ(machine::bf16_of(1 + 0x1p-8F), 0x3f80);
  EXPECT_EQ(machine::bf16_of(1 + 3 * 0x1p-8F), 0x3f82);
  EXPECT_EQ(machine::bf16_of(machine::float_of(0x7f800001)), 0x7fff);
  EXPECT_EQ(machine::f16_of(machine::float_of(0xff800001)), 0x7fff);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
