#pragma once

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/kernels/cuda/emulator/copies.h"
#include "tests/kernels/cuda/emulator/emulator.h"
#include "tests/kernels/cuda/emulator/fibers.h"
#include "tests/kernels/cuda/emulator/mbarriers.h"
#include "tests/kernels/cuda/emulator/memory.h"
#include "tests/kernels/cuda/emulator/shared_memory.h"
#include "tests/kernels/cuda/emulator/tiles.h"
#include "tests/kernels/cuda/emulator/warpgroup.h"

namespace dmuon::kernels::cuda::emulator {

inline constexpr int kWarp = 32;           ///< threads
inline constexpr int kNamedBarriers = 16;  ///< of a block; 0 is of all threads

/// A launch that is running. Clusters run one after the other, their threads in turns.
///
/// launch.cpp has the turns, launch_memory.cpp and launch_order.cpp what a thread calls in its
/// turn.
class Launch {
 public:
  Launch(const Grid& grid, const std::vector<Buffer>& buffers,
         const std::function<void()>& block_thread, unsigned seed, std::ptrdiff_t to_host);
  std::vector<std::string> run();

  int thread() const { return current_ % threads_a_block(); }
  int rank() const { return current_ / threads_a_block(); }
  int block_x() const { return static_cast<int>(block() % grid_.x); }
  int num_blocks_x() const { return static_cast<int>(grid_.x); }
  int block_y() const { return static_cast<int>(block() / grid_.x); }

  const void* read(const void* address, std::size_t bytes, Site site);
  void* write(void* address, std::size_t bytes, Site site);
  std::uint32_t atomic_add(std::uint32_t* address, std::uint32_t value, Site site);
  SharedMemory& shared() { return shared_[static_cast<std::size_t>(rank())]; }
  void copy_async(int word, const void* source, int bytes, Site site);
  void commit_copies() { me().copies.commit(); }
  void wait_copies(int pending) { me().copies.wait(pending, shared(), now()); }
  void copy_tile(int word, const TensorMap& map, int mbarrier, const TileAt& at, bool to_both,
                 Site site);

  void wait_for_kernel_before();
  void fence();
  void barrier(int id, int threads, Site site);
  void cluster_barrier(Site site);
  void together(Instruction instruction, int variant, void* argument, int threads, Site site);
  void mbarrier_init(int word, std::uint32_t count, Site site);
  void mbarrier_init_fence() { mbarriers_.fence(now()); }
  void mbarrier_arrive(int word, int rank, std::uint32_t bytes, Site site);
  void mbarrier_wait(int word, std::uint32_t parity, Site site);
  /// What a warpgroup does, when its threads are together.
  void multiply(const Multiplication* const* lanes);
  Multiplications& multiplications();
  void wait_multiplications(std::uint32_t pending, Site site);
  void change_registers(int count, bool takes, Site site);
  /// What each thread does after it.
  void wait_registers(Site site);

  Now now();
  void report(Site site, const std::string& what);

 private:
  enum class Waits { kNo, kBarrier, kTogether, kMbarrier, kRegisters };
  struct Thread {
    Waits waits = Waits::kNo;
    Site site{"", 0};
    std::uint32_t time = 1;
    Known known;
    Known fenced;             // what it knew at its last fence
    Released fenced_foreign;  // and of other clusters
    Released seen;            // by atomic operations since
    Copies copies;
    bool has_waited = false;             // for the kernel in front, or knows of who has
    const Mbarrier* mbarrier = nullptr;  // that it waits for
    std::uint32_t parity = 0;
  };
  // The instruction that the threads of a warp or a warpgroup arrive at.
  struct Gathering {
    int arrived = 0;
    Instruction instruction = nullptr;
    int variant = 0;
    int line = 0;
    std::vector<void*> arguments;
  };
  struct Barrier {
    std::vector<int> arrived;
    int threads = 0;
    int line = 0;
  };
  // What a warpgroup has and wants of its block's registers.
  struct Registers {
    int count = 0;  // a thread's
    int wanted = 0;
  };
  // The last time at which a thread, or a tile's copy, changed a block's memory from outside.
  struct Sent {
    std::uint32_t time = 0;
    Site site{"", 0};
  };

  int threads_a_block() const { return static_cast<int>(grid_.threads); }
  unsigned block() const { return cluster_ * grid_.cluster + static_cast<unsigned>(rank()); }
  Thread& me() { return threads_[static_cast<std::size_t>(current_)]; }
  std::string name(const Moment& moment) const;
  void check_has_waited(Site site);

  void run_cluster(unsigned cluster);
  void start_threads();
  bool run_round();
  bool goes_on(std::size_t thread);
  void mix_threads();
  void end_a_tile();
  void check_ended();
  void check_left();
  void meet(Barrier& barrier, int id, int threads, Site site);
  void note_sent(int rank, const Moment& moment, Site site);
  bool has_ended(int rank) const;
  void grant_registers(std::size_t warpgroup);

  Grid grid_;
  const std::function<void()>& body_;
  std::minstd_rand random_;
  std::ptrdiff_t to_host_;
  Report report_;
  std::vector<std::string> errors_;
  GlobalMemory global_;
  std::vector<SharedMemory> shared_;  // of the cluster's blocks, as all that follows
  Known nothing_;
  std::vector<Thread> threads_;
  std::vector<Gathering> warps_;
  std::vector<Gathering> warpgroups_;
  std::vector<int> order_;
  std::vector<Barrier> barriers_;  // kNamedBarriers for each block, and the cluster's
  Mbarriers mbarriers_;
  Tiles tiles_;
  std::vector<Multiplications> multiplications_;
  std::vector<Registers> registers_;     // of each warpgroup
  std::vector<int> free_registers_;      // of each block
  std::vector<Moment> waited_;           // for the kernel in front
  std::vector<std::vector<Sent>> sent_;  // to each block, by thread
  std::unordered_map<std::uint32_t*, Released> atomics_;
  Acquired acquired_;  // by the running cluster
  Joiner joiner_;
  unsigned cluster_ = 0;
  int current_ = 0;
};

}  // namespace dmuon::kernels::cuda::emulator
