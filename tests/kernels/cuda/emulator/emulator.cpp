#include "tests/kernels/cuda/emulator/emulator.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <unordered_map>

#include "tests/kernels/cuda/emulator/copies.h"
#include "tests/kernels/cuda/emulator/fibers.h"
#include "tests/kernels/cuda/emulator/memory.h"

namespace dmuon::kernels::cuda::emulator {
namespace {

constexpr std::size_t kMostErrors = 10;
constexpr int kWarp = 32;

enum class Waits { kNo, kBarrier, kTogether };

struct Thread {
  Waits waits = Waits::kNo;
  Site site{"", 0};
  std::uint32_t epoch = 0;
  std::uint32_t fences = 0;
  std::optional<Moment> last_fence;
  Released seen;  // by atomic operations since the last fence
  Copies copies;
};

// The instruction that a warp's threads arrive at.
struct Warp {
  int arrived = 0;
  Instruction instruction = nullptr;
  int variant = 0;
  int line = 0;
  void* arguments[kWarp] = {};
};

class Launch {
 public:
  Launch(const Grid& grid, const std::vector<Buffer>& buffers,
         const std::function<void()>& block_thread, unsigned seed, std::ptrdiff_t to_host)
      : grid_(grid),
        body_(block_thread),
        random_(seed),
        to_host_(to_host),
        global_(buffers, [this](Site site, const std::string& what) { report(site, what); }),
        shared_([this](Site site, const std::string& what) { report(site, what); }),
        threads_(grid.threads),
        warps_(grid.threads / kWarp),
        order_(grid.threads) {
    if (fibers().size() < grid.threads) fibers().resize(grid.threads);
    std::iota(order_.begin(), order_.end(), 0);
  }

  std::vector<std::string> run() {
    const bool all = grid_.only < 0;
    const auto only = static_cast<unsigned>(all ? 0 : grid_.only);
    const std::size_t count = std::size_t{grid_.x} * grid_.y;
    std::vector<unsigned> blocks(all ? count : only < count ? 1 : 0);
    std::iota(blocks.begin(), blocks.end(), only);
    std::ranges::shuffle(blocks, random_);
    for (const unsigned block : blocks) run_block(block);
    if (all && errors_.empty()) global_.check_written();
    return errors_;
  }

  int thread() const { return current_; }
  int block_x() const { return static_cast<int>(block_ % grid_.x); }
  int block_y() const { return static_cast<int>(block_ / grid_.x); }

  const void* read(const void* address, std::size_t bytes, Site site) {
    static constexpr char kZeros[16] = {};
    if (!global_.read(address, bytes, now(), acquired_, site)) return kZeros;
    return static_cast<const char*>(address) + to_host_;
  }

  void* write(void* address, std::size_t bytes, Site site) {
    static char nowhere[16];
    if (!global_.write(address, bytes, now(), acquired_, site)) return nowhere;
    return static_cast<char*>(address) + to_host_;
  }

  std::uint32_t shared_load(int word, Site site) { return shared_.load(word, now(), site); }
  void shared_store(int word, std::uint32_t value, Site site) {
    shared_.store(word, value, now(), site);
  }
  void shared_load(std::uint32_t (&values)[4], int word, Site site) {
    shared_.load(values, word, now(), site);
  }

  void barrier(Site site) {
    Thread& own = me();
    own.site = site;
    own.waits = Waits::kBarrier;
    if (++at_barrier_ < grid_.threads) return Fiber::pause();
    at_barrier_ = 0;
    for (Thread& other : threads_) {
      other.waits = Waits::kNo;
      ++other.epoch;
    }
    Fiber::pause();  // any thread may go on first
  }

  void copy_async(int word, const void* source, int bytes, Site site) {
    const auto size = static_cast<std::size_t>(bytes);
    if (size > kCopiedBytes) return report(site, "a copy reads 0 to 16 bytes");
    if (bytes > 0 && !global_.read(source, size, now(), acquired_, site, kCopiedBytes)) return;
    me().copies.start(word, static_cast<const char*>(source) + to_host_, size, shared_, now(),
                      site);
  }
  void commit_copies() { me().copies.commit(); }
  void wait_copies(int pending) { me().copies.wait(pending, shared_, now()); }

  void together(Instruction instruction, int variant, void* argument, Site site) {
    Warp& warp = warps_[static_cast<std::size_t>(current_ / kWarp)];
    if (warp.arrived == 0) warp = {0, instruction, variant, site.line, {}};
    if (warp.instruction != instruction || warp.variant != variant || warp.line != site.line) {
      report(site, "the warp's threads execute different instructions, this one and line " +
                       std::to_string(warp.line));
    }
    warp.arguments[current_ % kWarp] = argument;
    me().site = site;
    me().waits = Waits::kTogether;
    if (++warp.arrived < kWarp) return Fiber::pause();
    warp.arrived = 0;
    warp.instruction(warp.arguments);
    const auto first = threads_.begin() + current_ / kWarp * kWarp;
    std::for_each(first, first + kWarp, [](Thread& thread) { thread.waits = Waits::kNo; });
  }

  void fence() {
    Thread& own = me();
    own.last_fence = now();
    ++own.fences;
    if (!own.seen.empty()) acquired_.add(own.seen, now());
    own.seen = {};
  }

  std::uint32_t atomic_add(std::uint32_t* address, std::uint32_t value, Site site) {
    if (!global_.atomic(address, site)) return 0;
    Thread& own = me();
    Released& released = atomics_[address];
    own.seen.add(released);
    if (own.last_fence) {
      released.add(*own.last_fence);
      released.add(acquired_.known(*own.last_fence));
    }
    auto* const word =
        reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(address) + to_host_);
    const std::uint32_t before = *word;
    *word += value;
    return before;
  }

 private:
  // Fibers are kept for the next launch, because their stacks take long to make.
  static std::vector<Fiber>& fibers() {
    static std::vector<Fiber> all;
    return all;
  }

  Thread& me() { return threads_[static_cast<std::size_t>(current_)]; }
  Moment now() {
    const Thread& own = me();
    return {static_cast<int>(block_), current_, own.epoch, own.fences};
  }

  void report(Site site, const std::string& what) {
    if (errors_.size() >= kMostErrors) return;
    std::string where(site.file);
    where = where.substr(where.find_last_of('/') + 1);
    errors_.push_back(where.empty()
                          ? what
                          : where + ":" + std::to_string(site.line) + " block (" +
                                std::to_string(block_x()) + ", " + std::to_string(block_y()) +
                                ") thread " + std::to_string(current_) + ": " + what);
  }

  // Warps in any order, and each warp's threads from any of them on; now and then from new places.
  void mix_threads() {
    const std::size_t warps = threads_.size() / kWarp;
    std::vector<int> warp_order(warps);
    std::iota(warp_order.begin(), warp_order.end(), 0);
    std::ranges::shuffle(warp_order, random_);
    for (std::size_t i = 0; i < warps; ++i) {
      const unsigned rotation = random_();
      for (unsigned lane = 0; lane < kWarp; ++lane) {
        order_[i * kWarp + lane] =
            warp_order[i] * kWarp + static_cast<int>((lane + rotation) % kWarp);
      }
    }
  }

  void run_block(unsigned block) {
    block_ = block;
    threads_.assign(threads_.size(), {});
    warps_.assign(warps_.size(), {});
    acquired_.clear();
    shared_.reset(grid_.shared_bytes);
    at_barrier_ = 0;
    for (std::size_t i = 0; i < threads_.size(); ++i) fibers()[i].start(body_);
    for (bool moved = true; moved;) {
      moved = false;
      mix_threads();
      for (const int thread : order_) {
        const auto i = static_cast<std::size_t>(thread);
        if (fibers()[i].ended() || threads_[i].waits != Waits::kNo) continue;
        current_ = thread;
        fibers()[i].resume();
        moved = true;
      }
    }
    check_ended();
  }

  void check_ended() {
    std::size_t waiting = 0;
    Site site{"", 0};
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      if (fibers()[i].overflowed()) report({"", 0}, "a fiber's stack is too small");
      if (!threads_[i].copies.empty()) report({"", 0}, "a thread ends with copies in flight");
      if (fibers()[i].ended()) continue;
      ++waiting;
      site = threads_[i].site;
    }
    if (waiting > 0) {
      report(site, "deadlock: " + std::to_string(waiting) + " of " +
                       std::to_string(threads_.size()) +
                       " threads wait at a barrier or an instruction that the others do not reach");
    }
  }

  Grid grid_;
  const std::function<void()>& body_;
  std::minstd_rand random_;
  std::ptrdiff_t to_host_;
  GlobalMemory global_;
  SharedMemory shared_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<int> order_;
  std::vector<std::string> errors_;
  std::unordered_map<std::uint32_t*, Released> atomics_;
  Acquired acquired_;  // by the running block
  unsigned block_ = 0;
  int current_ = 0;
  unsigned at_barrier_ = 0;
};

Launch* running = nullptr;

}  // namespace

std::vector<std::string> run(const Grid& grid, const std::vector<Buffer>& buffers,
                             const std::function<void()>& block_thread, unsigned seed,
                             std::ptrdiff_t to_host) {
  if (grid.threads % kWarp != 0) return {"a block's threads must be whole warps"};
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
const void* read(const void* address, std::size_t bytes, Site site) {
  return running->read(address, bytes, site);
}
void* write(void* address, std::size_t bytes, Site site) {
  return running->write(address, bytes, site);
}
std::uint32_t shared_load(int word, Site site) { return running->shared_load(word, site); }
void shared_store(int word, std::uint32_t value, Site site) {
  running->shared_store(word, value, site);
}
void shared_load(std::uint32_t (&values)[4], int word, Site site) {
  running->shared_load(values, word, site);
}
void barrier(Site site) { running->barrier(site); }
void copy_async(int word, const void* source, int bytes, Site site) {
  running->copy_async(word, source, bytes, site);
}
void commit_copies() { running->commit_copies(); }
void wait_copies(int pending) { running->wait_copies(pending); }
void together(Instruction instruction, int variant, void* argument, Site site) {
  running->together(instruction, variant, argument, site);
}
void fence() { running->fence(); }
std::uint32_t atomic_add(std::uint32_t* address, std::uint32_t value, Site site) {
  return running->atomic_add(address, value, site);
}

}  // namespace dmuon::kernels::cuda::emulator
