#include "tests/kernels/cuda/emulator/launch.h"

#include <algorithm>
#include <numeric>

namespace dmuon::kernels::cuda::emulator {
namespace {

constexpr std::size_t kMostErrors = 10;

// Fibers are kept for the next launch, because their stacks take long to make.
std::vector<Fiber>& fibers() {
  static std::vector<Fiber> all;
  return all;
}

}  // namespace

Launch::Launch(const Grid& grid, const std::vector<Buffer>& buffers,
               const std::function<void()>& block_thread, unsigned seed, std::ptrdiff_t to_host)
    : grid_(grid),
      body_(block_thread),
      random_(seed),
      to_host_(to_host),
      report_{[this](Site site, const std::string& what) { report(site, what); },
              [this](const Moment& moment) { return name(moment); }},
      global_(buffers, report_),
      threads_(std::size_t{grid.threads} * grid.cluster),
      order_(threads_.size()),
      mbarriers_(report_, shared_),
      tiles_(report_, global_, shared_, mbarriers_, to_host) {
  for (unsigned i = 0; i < grid.cluster; ++i) shared_.emplace_back(report_);
  if (fibers().size() < threads_.size()) fibers().resize(threads_.size());
  std::iota(order_.begin(), order_.end(), 0);
}

std::vector<std::string> Launch::run() {
  const bool all = grid_.only < 0;
  const std::size_t count = std::size_t{grid_.x} * grid_.y / grid_.cluster;
  const unsigned first = all ? 0U : static_cast<unsigned>(grid_.only) / grid_.cluster;
  std::vector<unsigned> clusters(all ? count : first < count ? 1 : 0);
  std::iota(clusters.begin(), clusters.end(), first);
  std::ranges::shuffle(clusters, random_);
  for (const unsigned cluster : clusters) run_cluster(cluster);
  if (all && errors_.empty()) global_.check_written();
  return errors_;
}

void Launch::report(Site site, const std::string& what) {
  if (errors_.size() >= kMostErrors) return;
  std::string where(site.file);
  where = where.substr(where.find_last_of('/') + 1);
  errors_.push_back(where.empty()
                        ? what
                        : where + ":" + std::to_string(site.line) + " block (" +
                              std::to_string(block_x()) + ", " + std::to_string(block_y()) +
                              ") thread " + std::to_string(thread()) + ": " + what);
}

std::string Launch::name(const Moment& moment) const {
  const int threads = static_cast<int>(threads_.size());
  if (moment.thread >= threads + static_cast<int>(multiplications_.size())) return "a tile's copy";
  if (moment.thread >= threads)
    return "a multiplication of warpgroup " + std::to_string(moment.thread - threads);
  const int rank = moment.thread / threads_a_block();
  return "block " + std::to_string(moment.cluster * static_cast<int>(grid_.cluster) + rank) +
         " thread " + std::to_string(moment.thread % threads_a_block());
}

// Warps in any order, and each warp's threads from any of them on; now and then from new places.
void Launch::mix_threads() {
  const std::size_t warps = warps_.size();
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

void Launch::start_threads() {
  const std::size_t threads = threads_.size();
  const std::size_t warpgroups = (threads + kWarpgroup - 1) / kWarpgroup;
  nothing_ = std::make_shared<std::vector<std::uint32_t>>(threads + warpgroups + kMostMbarriers);
  threads_ = std::vector<Thread>(threads);
  for (Thread& thread : threads_) thread.known = nothing_;
  warps_.assign(threads / kWarp, {});
  warpgroups_.assign(warpgroups, {});
  barriers_.assign(std::size_t{kNamedBarriers} * grid_.cluster + 1, {});
  acquired_.clear();
  waited_.clear();
  for (SharedMemory& shared : shared_) shared.reset(grid_.shared_bytes);
  mbarriers_.reset(static_cast<int>(threads + warpgroups), nothing_);
  tiles_.reset();
  multiplications_.clear();
  for (std::size_t i = 0; i < warpgroups; ++i)
    multiplications_.emplace_back(report_, static_cast<int>(cluster_),
                                  static_cast<int>(threads + i));
  registers_.assign(warpgroups, {static_cast<int>(grid_.registers), 0});
  free_registers_.assign(grid_.cluster, 0);
  sent_.assign(grid_.cluster, std::vector<Sent>(nothing_->size()));
  for (std::size_t i = 0; i < threads; ++i) fibers()[i].start(body_);
}

void Launch::run_cluster(unsigned cluster) {
  cluster_ = cluster;
  start_threads();
  for (bool moved = true; moved;) {
    moved = run_round();
    if (tiles_.in_flight() > 0 && (!moved || random_() % 4 == 0)) {
      end_a_tile();
      moved = true;
    }
  }
  check_ended();
}

bool Launch::run_round() {
  bool moved = false;
  mix_threads();
  for (const int thread : order_) {
    const auto i = static_cast<std::size_t>(thread);
    if (fibers()[i].ended() || !goes_on(i)) continue;
    current_ = thread;
    fibers()[i].resume();
    moved = true;
  }
  return moved;
}

bool Launch::goes_on(std::size_t thread) {
  Thread& own = threads_[thread];
  if (own.waits == Waits::kMbarrier && own.mbarrier->passes(own.parity)) own.waits = Waits::kNo;
  if (own.waits == Waits::kRegisters) {
    const std::size_t warpgroup = thread / kWarpgroup;
    grant_registers(warpgroup);
    if (registers_[warpgroup].count == registers_[warpgroup].wanted) own.waits = Waits::kNo;
  }
  return own.waits == Waits::kNo;
}

void Launch::end_a_tile() {
  const std::size_t which = random_() % tiles_.in_flight();
  if (has_ended(tiles_.block_of(which)))
    report(tiles_.site_of(which), "a tile's copy arrives in a block that has ended");
  tiles_.end(which);
}

bool Launch::has_ended(int rank) const {
  const auto first = fibers().begin() + rank * threads_a_block();
  return std::all_of(first, first + threads_a_block(),
                     [](const Fiber& one) { return one.ended(); });
}

void Launch::check_ended() {
  std::size_t waiting = 0;
  Site site{"", 0};
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    if (fibers()[i].overflowed()) report({"", 0}, "a fiber's stack is too small");
    if (!threads_[i].copies.empty()) report({"", 0}, "a thread ends with copies in flight");
    if (fibers()[i].ended()) continue;
    if (waiting++ > 0) continue;
    current_ = static_cast<int>(i);
    site = threads_[i].site;
  }
  if (waiting > 0) {
    report(site, "deadlock: " + std::to_string(waiting) + " of " + std::to_string(threads_.size()) +
                     " threads wait at a barrier or an instruction that the others do not reach");
    return;
  }
  if (grid_.begins_early && waited_.size() < threads_.size())
    report({"", 0}, "a thread has not waited for the kernel in front");
  for (const Multiplications& one : multiplications_)
    if (!one.empty()) report({"", 0}, "a warpgroup ends with multiplications in flight");
  mbarriers_.check_ended();
  check_left();
}

// A block may end only if one of its threads knows that nobody sends to it any more.
void Launch::check_left() {
  for (std::size_t rank = 0; rank < sent_.size(); ++rank) {
    const auto first = threads_.begin() + static_cast<std::ptrdiff_t>(rank) * threads_a_block();
    for (std::size_t i = 0; i < sent_[rank].size(); ++i) {
      const Sent& sent = sent_[rank][i];
      if (sent.time == 0) continue;
      const bool known = std::any_of(first, first + threads_a_block(), [&](const Thread& thread) {
        return (*thread.known)[i] >= sent.time;
      });
      if (!known) {
        if (i < threads_.size()) current_ = static_cast<int>(i);
        return report(sent.site, "block " + std::to_string(rank) +
                                     " of the cluster may have ended when this arrives");
      }
    }
  }
}

}  // namespace dmuon::kernels::cuda::emulator
