#include "tests/kernels/cuda/emulator/emulator.h"

#include <mutex>

#include "tests/kernels/cuda/emulator/launch.h"

namespace dmuon::kernels::cuda::emulator {
namespace {

Launch* running = nullptr;

struct Change {
  int count;
  bool takes;
  Site site;
};
struct Wait {
  std::uint32_t pending;
  Site site;
};

}  // namespace

std::vector<std::string> run(const Grid& grid, const std::vector<Buffer>& buffers,
                             const std::function<void()>& block_thread, unsigned seed,
                             std::ptrdiff_t to_host) {
  if (grid.threads % kWarp != 0) return {"a block's threads must be whole warps"};
  if (grid.x % grid.cluster != 0) return {"blocks along x must be whole clusters"};
  static std::mutex one;
  const std::scoped_lock lock(one);
  Launch launch(grid, buffers, block_thread, seed, to_host);
  running = &launch;
  auto errors = launch.run();
  running = nullptr;
  return errors;
}

int thread() { return running->thread(); }
int block_x() { return running->block_x(); }
int block_y() { return running->block_y(); }
int num_blocks_x() { return running->num_blocks_x(); }
const void* read(const void* address, std::size_t bytes, Site site) {
  return running->read(address, bytes, site);
}
void* write(void* address, std::size_t bytes, Site site) {
  return running->write(address, bytes, site);
}
std::uint32_t shared_load(int word, Site site) {
  return running->shared().load(word, running->now(), site);
}
void shared_store(int word, std::uint32_t value, Site site) {
  running->shared().store(word, value, running->now(), site);
}
void shared_load(std::uint32_t (&values)[4], int word, Site site) {
  running->shared().load(values, word, running->now(), site);
}
void barrier(Site site) { running->barrier(0, 0, site); }
void copy_async(int word, const void* source, int bytes, Site site) {
  running->copy_async(word, source, bytes, site);
}
void commit_copies() { running->commit_copies(); }
void wait_copies(int pending) { running->wait_copies(pending); }
void together(Instruction instruction, int variant, void* argument, Site site, int threads) {
  running->together(instruction, variant, argument, threads, site);
}
void fence() { running->fence(); }
std::uint32_t atomic_add(std::uint32_t* address, std::uint32_t value, Site site) {
  return running->atomic_add(address, value, site);
}

void wait_for_kernel_before() { running->wait_for_kernel_before(); }
int cluster_rank() { return running->rank(); }
void cluster_barrier(Site site) { running->cluster_barrier(site); }
void named_barrier(int id, int threads, Site site) {
  if (id == 0) return running->report(site, "a named barrier has a number from 1 to 15");
  running->barrier(id, threads, site);
}
void mbarrier_init(int word, std::uint32_t count, Site site) {
  running->mbarrier_init(word, count, site);
}
void mbarrier_init_fence() { running->mbarrier_init_fence(); }
void mbarrier_arrive(int word, int rank, std::uint32_t bytes, Site site) {
  running->mbarrier_arrive(word, rank, bytes, site);
}
void mbarrier_wait(int word, std::uint32_t parity, Site site) {
  running->mbarrier_wait(word, parity, site);
}
void copy_tile(int word, const TensorMap& map, int mbarrier, int col, int row, int matrix,
               bool to_both, Site site) {
  running->copy_tile(word, map, mbarrier, {col, row, matrix}, to_both, site);
}

void change_registers(int count, bool takes, Site site) {
  Change change{count, takes, site};
  together(
      [](void* const* lanes) {
        const auto& first = *static_cast<Change*>(lanes[0]);
        running->change_registers(first.count, first.takes, first.site);
      },
      count, &change, site, kWarpgroup);
  running->wait_registers(site);
}

void multiply(const Multiplication& multiplication) {
  together(
      [](void* const* lanes) {
        const Multiplication* all[kWarpgroup];
        for (int i = 0; i < kWarpgroup; ++i) all[i] = static_cast<const Multiplication*>(lanes[i]);
        running->multiply(all);
      },
      multiplication.cols, const_cast<Multiplication*>(&multiplication), multiplication.site,
      kWarpgroup);
}

void multiplication_fence(Site site) {
  together([](void* const*) { running->multiplications().fence(); }, 0, nullptr, site, kWarpgroup);
}

void commit_multiplications(Site site) {
  together([](void* const*) { running->multiplications().commit(); }, 0, nullptr, site, kWarpgroup);
}

void wait_multiplications(std::uint32_t pending, Site site) {
  Wait wait{pending, site};
  together(
      [](void* const* lanes) {
        const auto& first = *static_cast<Wait*>(lanes[0]);
        running->wait_multiplications(first.pending, first.site);
      },
      static_cast<int>(pending), &wait, site, kWarpgroup);
}

void check_nan(float value, Site site) {
  if (running != nullptr && is_poison(value))
    running->report(site, "a number comes from sums that a multiplication was still changing");
}

}  // namespace dmuon::kernels::cuda::emulator
