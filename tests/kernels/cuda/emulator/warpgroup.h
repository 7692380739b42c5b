#pragma once

#include <cstdint>
#include <vector>

#include "tests/kernels/cuda/emulator/narrow.h"
#include "tests/kernels/cuda/emulator/report.h"
#include "tests/kernels/cuda/emulator/shared_memory.h"

namespace dmuon::kernels::cuda::emulator {

inline constexpr int kWarpgroup = 128;  ///< threads

/// An operand of a multiplication, in tiles in shared memory. Transposed, a tile's row is a column
/// of the operand, and has 64 of its rows; further rows are further tiles.
struct OperandOf {
  std::uint64_t descriptor;
  bool transposed;

  bool operator==(const OperandOf&) const = default;
};

/// A thread's arguments of wgmma.mma_async: sums <- a b' + sums, or a b' alone, in fp32. a is 64 x
/// 16 and b is cols x 16 in 16 bits.
///
/// Thread t has in sums[i] the entry (t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + t % 4 *
/// 2 + i % 2).
struct Multiplication {
  float* sums;  ///< [cols / 2]
  int cols;
  OperandOf a, b;
  bool accumulates;
  Narrow format;
  Site site;
};

/// The multiplications of a warpgroup. Each is a moment of a thread of its own, whose time is the
/// group of multiplications.
class Multiplications {
 public:
  Multiplications(const Report& report, int cluster, int thread)
      : report_(report), cluster_(cluster), thread_(thread) {}

  void fence() { fenced_ = true; }
  /// Begins a multiplication. Its threads must not touch the sums until they have waited for it.
  /// @param lanes  [128] the threads'
  /// @param nows   [128] what they know
  void begin(const Multiplication* const* lanes, const std::vector<Now>& nows,
             SharedMemory& shared);
  void commit() { ++committed_; }
  /// Ends all groups but the last `pending`; returns how many have ended.
  std::uint32_t wait(std::uint32_t pending, Site site);
  int thread() const { return thread_; }
  bool empty() const { return all_.empty(); }

 private:
  // Sums in registers that multiplications change. Meanwhile the registers hold kPoison.
  struct Sums {
    std::vector<float*> registers;  // of the 128 threads
    int cols;
    std::uint32_t group;  // the last one that changes them
    std::vector<float> values;

    template <typename Visit>
    void for_each(const Visit& visit);
  };
  bool check_lanes(const Multiplication* const* lanes);
  Sums& sums_of(const Multiplication* const* lanes);
  bool load(std::vector<float>& values, const OperandOf& operand, int rows,
            const Multiplication& of, const std::vector<Now>& nows, SharedMemory& shared);

  const Report& report_;
  int cluster_;
  int thread_;
  bool fenced_ = false;
  std::uint32_t committed_ = 0;
  std::uint32_t ended_ = 0;
  std::vector<Sums> all_;
};

/// True if a number was computed from sums that a multiplication was still changing.
bool is_poison(float value);

}  // namespace dmuon::kernels::cuda::emulator
