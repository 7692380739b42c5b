#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/kernels/cuda/machine.h"

// How threads of a block wait for each other, for registers and for the kernel in front, in the
// emulator.
namespace dmuon::kernels::cuda {
namespace {

std::string run(const emulator::Grid& grid, const std::function<void()>& block_thread,
                const std::vector<emulator::Buffer>& buffers = {}) {
  std::string all;
  for (const std::string& sentence : emulator::run(grid, buffers, block_thread, 1))
    all += sentence + "\n";
  return all;
}

// Threads 0 to 63 meet at a named barrier, and read what they stored before.
std::string meets(int id, int threads, int other_threads) {
  const auto block_thread = [=] {
    const int t = machine::thread();
    if (t >= 64) return;
    machine::shared_store(t, 0);
    machine::named_barrier(id, t < 32 ? threads : other_threads);
    machine::shared_load(63 - t);
  };
  return run({.threads = 96, .shared_bytes = 256}, block_thread);
}

TEST(Waits, HasNamedBarriers) {
  EXPECT_EQ(meets(3, 64, 64), "");
  EXPECT_NE(meets(3, 32, 32).find("race: loads shared word"), std::string::npos);
  EXPECT_NE(meets(3, 96, 96).find("deadlock"), std::string::npos);
  EXPECT_NE(meets(3, 64, 32).find("barrier 3 is of"), std::string::npos);
  EXPECT_NE(meets(16, 64, 64).find("from 1 to 15"), std::string::npos);
  EXPECT_NE(meets(0, 64, 64).find("from 1 to 15"), std::string::npos);
  EXPECT_NE(meets(1, 40, 40).find("whole warps"), std::string::npos);
}

// All of 96 threads load a word. Those of two warps meet, and one of them overwrites the word.
TEST(Waits, FindsReadersThatDidNotComeToTheBarrier) {
  const auto block_thread = [] {
    const int t = machine::thread();
    if (t == 0) machine::shared_store(0, 1);
    machine::barrier();
    machine::shared_load(0);
    if (t >= 64) return;
    machine::named_barrier(1, 64);
    if (t == 40) machine::shared_store(0, 2);
  };
  const std::string all = run({.threads = 96, .shared_bytes = 16}, block_thread);
  EXPECT_NE(all.find("race: overwrites shared word 0, loaded by block 0 thread 64"),
            std::string::npos)
      << all;
}

// A phase ends when all have arrived. Its parity passes until the next phase has ended.
TEST(Waits, HasPhasesOfMbarriers) {
  std::vector<int> seen;
  const auto block_thread = [&] {
    const int t = machine::thread();
    if (t == 0) machine::mbarrier_init(0, 2);
    machine::barrier();
    if (t == 0) machine::mbarrier_wait(0, 1);  // of the phase before the first
    for (unsigned phase = 0; phase < 3; ++phase) {
      if (t == 0) seen.push_back(static_cast<int>(phase));
      if (t == 0 || t == 40) machine::mbarrier_arrive(0, 0);
      machine::mbarrier_wait(0, phase % 2);
      if (t == 63) seen.push_back(10 + static_cast<int>(phase));
      machine::barrier();
    }
  };
  EXPECT_EQ(run({.threads = 64, .shared_bytes = 16}, block_thread), "");
  EXPECT_EQ(seen, (std::vector{0, 10, 1, 11, 2, 12}));
}

TEST(Waits, FindsBadMbarriers) {
  const auto expect = [](const char* words, const std::function<void()>& first_thread) {
    const auto block_thread = [&] {
      if (machine::thread() == 0) first_thread();
    };
    const std::string all = run({.threads = 32, .shared_bytes = 64}, block_thread);
    EXPECT_NE(all.find(words), std::string::npos) << words << "; found:\n" << all;
  };
  expect("no multiple of 2", [] { machine::mbarrier_init(3, 1); });
  expect("counts 1 to", [] { machine::mbarrier_init(2, 0); });
  expect("which is an mbarrier", [] {
    machine::mbarrier_init(2, 1);
    machine::mbarrier_init(2, 1);
  });
  expect("no mbarrier at shared word 4", [] { machine::mbarrier_arrive(4, 0); });
  expect("no block 1", [] {
    machine::mbarrier_init(2, 1);
    machine::mbarrier_arrive(2, 1);
  });
  expect("less than 2^20 bytes", [] {
    machine::mbarrier_init(2, 1);
    machine::mbarrier_expect(2, 1U << 20);
  });
  expect("8 expected bytes missing", [] {
    machine::mbarrier_init(2, 1);
    machine::mbarrier_expect(2, 8);
  });
}

// Thread 0 of 64 loads in a launch that begins before the kernel in front has ended.
std::string begins(bool waits, bool all_wait, bool meets_first) {
  const std::vector<float> x(1);
  const auto block_thread = [&] {
    const int t = machine::thread();
    if (waits && (t == 40 || all_wait)) machine::wait_for_kernel_before();
    if (meets_first) machine::barrier();
    if (t == 0) machine::load_f32(x.data());
  };
  return run({.threads = 64, .shared_bytes = 16, .begins_early = true}, block_thread,
             {{.name = "x", .base = x.data(), .row_bytes = 4}});
}

TEST(Waits, WaitsForTheKernelInFront) {
  EXPECT_EQ(begins(true, true, false), "");
  EXPECT_NE(begins(false, false, true).find("before the kernel in front"), std::string::npos);
  EXPECT_NE(begins(true, false, false).find("before the kernel in front"), std::string::npos);
  EXPECT_EQ(begins(true, false, true).find("before the kernel in front"), std::string::npos);
  EXPECT_NE(begins(true, false, true).find("a thread has not waited"), std::string::npos);
}

// Three warpgroups of 128 threads with `registers` each: one gives, two take.
std::string exchanges(unsigned registers) {
  const auto block_thread = [] {
    if (machine::thread() < 128) {
      machine::give_registers<40>();
    } else {
      machine::take_registers<232>();
    }
  };
  return run({.threads = 384, .shared_bytes = 16, .registers = registers}, block_thread);
}

TEST(Waits, GivesNoMoreRegistersThanThereAre) {
  EXPECT_EQ(exchanges(168), "");
  EXPECT_NE(exchanges(160).find("deadlock"), std::string::npos);
  EXPECT_NE(exchanges(32).find("are wrong"), std::string::npos);
}

}  // namespace
}  // namespace dmuon::kernels::cuda
