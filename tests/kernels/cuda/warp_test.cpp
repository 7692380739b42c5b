#include "tests/kernels/cuda/emulator/warp.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "dmuon/kernels/cuda/machine.h"

// Instructions of warps and asynchronous copies in the emulator; planted bugs are found.
namespace dmuon::kernels::cuda {
namespace {

using emulator::Access;
using emulator::Buffer;

std::string run(const std::vector<Buffer>& buffers, unsigned threads,
                const std::function<void()>& block_thread, unsigned seed = 1) {
  std::string all;
  for (const std::string& sentence :
       emulator::run({.threads = threads, .shared_bytes = 2048}, buffers, block_thread, seed))
    all += sentence + "\n";
  return all;
}

TEST(Warp, LoadsMatricesByThePtxIsasLayout) {
  std::vector<std::uint32_t> straight(128);
  std::vector<std::uint32_t> transposed(128);
  EXPECT_EQ(run({}, 32,
                [&] {
                  const int lane = machine::thread();
                  // Entry (i, j) of matrix m is 64 m + 8 i + j, in rows that lie apart.
                  const int row = (lane * 7 % 32) * 8;
                  for (int w = 0; w < 4; ++w) {
                    const auto entry = static_cast<std::uint32_t>(lane * 8 + 2 * w);
                    machine::shared_store(row + w, entry | (entry + 1) << 16);
                  }
                  machine::barrier();
                  std::uint32_t v[4];
                  machine::load_matrices(v, row);
                  for (int m = 0; m < 4; ++m)
                    straight[static_cast<std::size_t>(lane * 4 + m)] = v[m];
                  machine::load_matrices_transposed(v, row);
                  for (int m = 0; m < 4; ++m)
                    transposed[static_cast<std::size_t>(lane * 4 + m)] = v[m];
                }),
            "");
  for (unsigned lane = 0; lane < 32; ++lane) {
    for (unsigned m = 0; m < 4; ++m) {
      const unsigned i = lane / 4;
      const unsigned j = lane % 4 * 2;
      const auto entry = [m](unsigned row, unsigned col) { return 64 * m + 8 * row + col; };
      EXPECT_EQ(straight[lane * 4 + m], entry(i, j) | entry(i, j + 1) << 16);
      EXPECT_EQ(transposed[lane * 4 + m], entry(j, i) | entry(j + 1, i) << 16);
    }
  }
}

// The places of elements in fragments, by the formulas of the PTX ISA for mma.m16n8k16.
struct At {
  int row;
  int col;
};
At of_a(int lane, int i) {
  return {lane / 4 + (i < 2 || (i >= 4 && i < 6) ? 0 : 8),
          lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0)};
}
At of_b(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0), lane / 4}; }
At of_sums(int lane, int i) { return {lane / 4 + (i < 2 ? 0 : 8), lane % 4 * 2 + (i & 1)}; }

TEST(Warp, MultipliesFragmentsByThePtxIsasLayout) {
  std::mt19937 random(3);
  for (const bool fp16 : {true, false}) {
    float a[16][16];
    float b[16][8];
    double sums[16][8];
    const auto small = [&] { return static_cast<float>(random() % 17) - 8; };  // exact in both
    for (auto& row : a)
      for (float& v : row) v = small();
    for (auto& row : b)
      for (float& v : row) v = small();
    for (auto& row : sums)
      for (double& v : row) v = small();
    const auto narrow = [fp16](float v) {
      return std::uint32_t{fp16 ? machine::f16_of(v) : machine::bf16_of(v)};
    };
    float got[16][8];
    EXPECT_EQ(
        run({}, 32,
            [&] {
              const int lane = machine::thread();
              std::uint32_t a_words[4] = {};
              std::uint32_t b_words[2] = {};
              float own[4];
              for (int i = 0; i < 8; ++i)
                a_words[i / 2] |= narrow(a[of_a(lane, i).row][of_a(lane, i).col]) << i % 2 * 16;
              for (int i = 0; i < 4; ++i) {
                b_words[i / 2] |= narrow(b[of_b(lane, i).row][of_b(lane, i).col]) << i % 2 * 16;
                own[i] = static_cast<float>(sums[of_sums(lane, i).row][of_sums(lane, i).col]);
              }
              if (fp16) {
                machine::multiply_add_f16(own, a_words, b_words);
              } else {
                machine::multiply_add_bf16(own, a_words, b_words);
              }
              for (int i = 0; i < 4; ++i) got[of_sums(lane, i).row][of_sums(lane, i).col] = own[i];
            }),
        "");
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 8; ++j) {
        for (int k = 0; k < 16; ++k) sums[i][j] += static_cast<double>(a[i][k]) * b[k][j];
        EXPECT_EQ(got[i][j], sums[i][j]) << i << ", " << j;
      }
    }
  }
}

TEST(Warp, FindsThreadsThatExecuteAnotherInstruction) {
  const auto with = [](auto of_lane) { return run({}, 32, [&] { of_lane(machine::thread()); }); };
  EXPECT_NE(with([](int lane) {
              std::uint32_t v[4];
              for (int i = 0; i < 4; ++i) machine::shared_store(lane * 4 + i, 0);
              if (lane < 16) {
                machine::load_matrices(v, lane * 4);
              } else {
                machine::load_matrices_transposed(v, lane * 4);
              }
            }).find("different instructions"),
            std::string::npos);
  EXPECT_NE(with([](int lane) {
              machine::shuffle_xor(1, lane < 16 ? 1 : 2);
            }).find("different instructions"),
            std::string::npos);
  EXPECT_NE(with([](int lane) {
              float sums[4] = {};
              const std::uint32_t a[4] = {};
              const std::uint32_t b[2] = {};
              if (lane != 7) machine::multiply_add_f16(sums, a, b);
            }).find("deadlock"),
            std::string::npos);
}

enum class Bug {
  kNone,
  kNoWait,
  kWaitsForTheWrongGroup,
  kNoCommit,
  kNoBarrier,
  kNoBarrierBeforeTheNext,
  kStoreInFlight,
  kUnalignedWord,
  kUnalignedSource,
  kPastTheRow,
  kNeverWaits,
};

// Adds up rows of 62 entries that copies bring in two stages of 8 entries a thread, as a kernel's
// pipeline does; each thread reads what another one copied.
struct Pipeline {
  static constexpr int kSteps = 5;
  std::vector<std::uint16_t> rows = std::vector<std::uint16_t>(kSteps * 64);
  std::vector<float> out = std::vector<float>(16);

  static int word_of(int step, int chunk) { return step % 2 * 32 + chunk * 4; }

  void fetch(int step, Bug bug) {
    const int t = machine::thread();
    if (step < kSteps && t < 8) {
      const int bytes = t == 7 && bug != Bug::kPastTheRow ? 12 : 16;
      const int shift = bug == Bug::kUnalignedSource ? 2 : 0;
      const int word = word_of(step, t) + (bug == Bug::kUnalignedWord ? 2 : 0);
      machine::copy_async(word, rows.data() + step * 64 + t * 8 - shift, bytes);
      if (bug == Bug::kStoreInFlight) machine::shared_store(word, 0);
    }
    if (bug != Bug::kNoCommit) machine::commit_copies();
  }

  void block_thread(Bug bug) {
    const int t = machine::thread();
    float sum = 0;
    fetch(0, bug);
    fetch(1, bug);
    for (int step = 0; step < kSteps; ++step) {
      if (bug == Bug::kWaitsForTheWrongGroup) {
        machine::wait_copies<2>();
      } else if (bug != Bug::kNoWait) {
        machine::wait_copies<1>();
      }
      if (bug != Bug::kNoBarrier) machine::barrier();
      if (bug == Bug::kNeverWaits) break;
      const int other = (t + 9) % 16;
      for (int i = 0; t < 16 && i < 2; ++i) {
        const std::uint32_t word = machine::shared_load(word_of(step, 0) + other * 2 + i);
        sum += machine::float_of_f16(static_cast<std::uint16_t>(word));
        sum += machine::float_of_f16(static_cast<std::uint16_t>(word >> 16));
      }
      if (bug != Bug::kNoBarrierBeforeTheNext) machine::barrier();
      fetch(step + 2, bug);
    }
    if (t < 16) machine::store_f32(out.data() + t, sum);
  }

  std::string found(Bug bug, unsigned seed) {
    return run(
        {{.name = "rows",
          .base = rows.data(),
          .row_bytes = 124,
          .rows = kSteps,
          .row_pitch = 128,
          .access = Access::kRead},
         {.name = "out", .base = out.data(), .row_bytes = 64, .access = Access::kWrite}},
        64, [&] { block_thread(bug); }, seed);
  }
};

TEST(Copies, BringWhatOtherThreadsRead) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    Pipeline pipeline;
    for (std::size_t i = 0; i < pipeline.rows.size(); ++i)  // NaN beyond the rows
      pipeline.rows[i] =
          i % 64 < 62 ? machine::f16_of(static_cast<float>(i % 64 + i / 64)) : 0x7fff;
    EXPECT_EQ(pipeline.found(Bug::kNone, seed), "");
    for (int t = 0; t < 16; ++t) {
      float sum = 0;
      for (int i = 0; i < 4; ++i) {
        const int col = (t + 9) % 16 * 4 + i;
        for (int step = 0; step < Pipeline::kSteps && col < 62; ++step)
          sum += static_cast<float>(col + step);
      }
      EXPECT_EQ(pipeline.out[static_cast<std::size_t>(t)], sum) << t;
    }
  }
}

TEST(Copies, FindEachPlantedBug) {
  const std::pair<Bug, const char*> bugs[] = {
      {Bug::kNoWait, "while a copy to it is in flight"},
      {Bug::kWaitsForTheWrongGroup, "while a copy to it is in flight"},
      {Bug::kNoCommit, "while a copy to it is in flight"},
      {Bug::kNoBarrier, "without a barrier"},
      {Bug::kNoBarrierBeforeTheNext, "race: overwrites shared word"},
      {Bug::kStoreInFlight, "while a copy to it is in flight"},
      {Bug::kUnalignedWord, "is no multiple of 4"},
      {Bug::kUnalignedSource, "not aligned"},
      {Bug::kPastTheRow, "between its rows or past its end"},
      {Bug::kNeverWaits, "ends with copies in flight"},
  };
  for (const auto& [bug, words] : bugs) {
    std::string all;
    for (unsigned seed = 1; seed <= 3; ++seed) all += Pipeline().found(bug, seed);
    EXPECT_NE(all.find(words), std::string::npos) << words << "; found:\n" << all;
  }
}

}  // namespace
}  // namespace dmuon::kernels::cuda
