#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/emulator/report.h"
#include "tests/kernels/cuda/emulator/shared_memory.h"

namespace dmuon::kernels::cuda::emulator {

inline constexpr int kMostMbarriers = 64;  ///< of a cluster

/// An mbarrier. Phase i ends when `count` threads have arrived and all expected bytes have. Waits
/// for the parity of phase i pass once it has ended, until the next phase ends.
struct Mbarrier {
  int index = 0;  ///< in the order of initialisation
  std::uint32_t count = 0;
  std::uint32_t missing = 0;  ///< arrivals
  long bytes = 0;             ///< that are expected and have not arrived
  std::uint32_t phases = 0;   ///< that have ended
  Moment made;
  bool fenced = false;       ///< after its initialisation: blocks of the cluster and copies see it
  int line = 0;              ///< of the last operation
  std::uint32_t copies = 0;  ///< that have begun
  Known arrived;             ///< what all who have arrived know
  Known known;               ///< the same, of phases that have ended

  bool passes(std::uint32_t parity) const { return phases % 2 != parity; }
};

/// The mbarriers of a cluster, by block and word. Each copy of a tile is a moment of its mbarrier's
/// own thread, `first_thread` + index.
class Mbarriers {
 public:
  Mbarriers(const Report& report, std::vector<SharedMemory>& shared)
      : report_(report), shared_(shared) {}
  void reset(int first_thread, const Known& nothing);
  void init(int block, int word, std::uint32_t count, const Now& now, Site site);
  /// Fences what this thread has initialised.
  void fence(const Now& now);
  /// Returns null, after a report, if a thread of block `user`, or a copy, must not use it.
  Mbarrier* find(int block, int word, int user, bool for_copy, const Now& now, Site site);
  /// One thread arrives, and expects more bytes.
  void arrive(Mbarrier& mbarrier, std::uint32_t bytes, const Known& known, Site site);
  /// The moment of a copy that begins.
  Moment begin_copy(Mbarrier& mbarrier, int cluster) const;
  /// The copy of that moment ends.
  void end_copy(Mbarrier& mbarrier, std::uint32_t bytes, const Moment& copy, Site site);
  /// Reports phases that are left in between.
  void check_ended() const;

 private:
  static void end_phase(Mbarrier& mbarrier);

  const Report& report_;
  std::vector<SharedMemory>& shared_;
  std::map<std::pair<int, int>, Mbarrier> all_;
  int first_thread_ = 0;
  Known nothing_;
};

}  // namespace dmuon::kernels::cuda::emulator
