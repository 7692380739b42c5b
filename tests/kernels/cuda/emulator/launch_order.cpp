#include <algorithm>

#include "tests/kernels/cuda/emulator/launch.h"

// What orders the threads of a launch.
namespace dmuon::kernels::cuda::emulator {

Now Launch::now() {
  const Thread& own = me();
  return {{static_cast<int>(cluster_), current_, own.time}, &own.known, &acquired_};
}

void Launch::meet(Barrier& barrier, int id, int threads, Site site) {
  if (barrier.arrived.empty()) barrier = {{}, threads, site.line};
  if (barrier.threads != threads) {
    report(site, "barrier " + std::to_string(id) + " is of " + std::to_string(threads) +
                     " threads here and of " + std::to_string(barrier.threads) + " at line " +
                     std::to_string(barrier.line));
  }
  me().site = site;
  me().waits = Waits::kBarrier;
  barrier.arrived.push_back(current_);
  if (static_cast<int>(barrier.arrived.size()) < barrier.threads) return Fiber::pause();
  auto all = std::make_shared<std::vector<std::uint32_t>>(me().known->size());
  const void* last = nullptr;  // threads that have met before know the same
  for (const int i : barrier.arrived) {
    const Known& known = threads_[static_cast<std::size_t>(i)].known;
    if (known.get() == last) continue;
    last = known.get();
    std::ranges::transform(*all, *known, all->begin(),
                           [](std::uint32_t x, std::uint32_t y) { return std::max(x, y); });
  }
  for (const int i : barrier.arrived)
    (*all)[static_cast<std::size_t>(i)] = threads_[static_cast<std::size_t>(i)].time;
  for (const int i : barrier.arrived) {
    Thread& other = threads_[static_cast<std::size_t>(i)];
    other.known = all;
    ++other.time;
    other.waits = Waits::kNo;
  }
  barrier.arrived.clear();
  Fiber::pause();  // any thread may go on first
}

void Launch::barrier(int id, int threads, Site site) {
  const bool named = id > 0 && id < kNamedBarriers && threads > 0 && threads % kWarp == 0 &&
                     threads <= threads_a_block();
  if (id != 0 && !named) {
    return report(site, "a named barrier has a number from 1 to 15, and whole warps of the block");
  }
  meet(barriers_[static_cast<std::size_t>(rank() * kNamedBarriers + id)], id,
       id == 0 ? threads_a_block() : threads, site);
}

void Launch::cluster_barrier(Site site) {
  meet(barriers_.back(), 0, static_cast<int>(threads_.size()), site);
}

void Launch::together(Instruction instruction, int variant, void* argument, int threads,
                      Site site) {
  if (threads > threads_a_block() || threads_a_block() % threads != 0)
    return report(site, "a block's threads must be whole warpgroups");
  const int place = current_ / threads;
  const int lane = current_ % threads;
  Gathering& all = (threads == kWarp ? warps_ : warpgroups_)[static_cast<std::size_t>(place)];
  if (all.arrived == 0) {
    all.instruction = instruction;
    all.variant = variant;
    all.line = site.line;
    all.arguments.resize(static_cast<std::size_t>(threads));
  }
  if (all.instruction != instruction || all.variant != variant || all.line != site.line) {
    report(site, (threads == kWarp ? "the warp's" : "the warpgroup's") +
                     std::string(" threads execute different instructions, this one and line ") +
                     std::to_string(all.line));
  }
  all.arguments[static_cast<std::size_t>(lane)] = argument;
  me().site = site;
  me().waits = Waits::kTogether;
  if (++all.arrived < threads) return Fiber::pause();
  all.arrived = 0;
  all.instruction(all.arguments.data());
  const auto first = threads_.begin() + place * threads;
  std::for_each(first, first + threads, [](Thread& thread) { thread.waits = Waits::kNo; });
}

void Launch::fence() {
  Thread& own = me();
  if (!own.seen.empty()) acquired_.add(own.seen, now().moment);
  own.seen = {};
  own.fenced = joined(own.known, current_, own.time);
  own.fenced_foreign = acquired_.known(now());
  ++own.time;
}

std::uint32_t Launch::atomic_add(std::uint32_t* address, std::uint32_t value, Site site) {
  check_has_waited(site);
  if (!global_.atomic(address, site)) return 0;
  Thread& own = me();
  Released& released = atomics_[address];
  own.seen.add(released);
  if (own.fenced != nullptr) {
    released.add(static_cast<int>(cluster_), own.fenced);
    released.add(own.fenced_foreign);
  }
  auto* const word = reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(address) + to_host_);
  const std::uint32_t before = *word;
  *word += value;
  return before;
}

void Launch::mbarrier_init(int word, std::uint32_t count, Site site) {
  mbarriers_.init(rank(), word, count, now(), site);
}

void Launch::note_sent(int rank, const Moment& moment, Site site) {
  if (has_ended(rank)) report(site, "the other block of the cluster has ended");
  sent_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(moment.thread)] = {moment.time,
                                                                                    site};
}

void Launch::mbarrier_arrive(int word, int rank, std::uint32_t bytes, Site site) {
  if (rank < 0 || rank >= static_cast<int>(grid_.cluster))
    return report(site, "the cluster has no block " + std::to_string(rank));
  Mbarrier* const found = mbarriers_.find(rank, word, this->rank(), false, now(), site);
  if (found == nullptr) return;
  if (rank != this->rank()) note_sent(rank, now().moment, site);
  mbarriers_.arrive(*found, bytes, joined(me().known, current_, me().time), site);
  ++me().time;
}

void Launch::mbarrier_wait(int word, std::uint32_t parity, Site site) {
  const Mbarrier* const found = mbarriers_.find(rank(), word, rank(), false, now(), site);
  if (found == nullptr) return;
  if (parity > 1) report(site, "a parity is 0 or 1");
  Thread& own = me();
  own.site = site;
  own.mbarrier = found;
  own.parity = parity;
  own.waits = Waits::kMbarrier;
  while (!found->passes(parity)) Fiber::pause();
  own.waits = Waits::kNo;
  own.known = joiner_(own.known, found->known);
}

Multiplications& Launch::multiplications() {
  return multiplications_[static_cast<std::size_t>(current_ / kWarpgroup)];
}

void Launch::multiply(const Multiplication* const* lanes) {
  std::vector<Now> nows;
  const int first = current_ / kWarpgroup * kWarpgroup;
  for (int i = first; i < first + kWarpgroup; ++i) {
    const Thread& one = threads_[static_cast<std::size_t>(i)];
    nows.push_back({{static_cast<int>(cluster_), i, one.time}, &one.known, &acquired_});
  }
  multiplications().begin(lanes, nows, shared());
}

void Launch::wait_multiplications(std::uint32_t pending, Site site) {
  Multiplications& own = multiplications();
  const std::uint32_t ended = own.wait(pending, site);
  if (ended == 0) return;
  const Known known = joined(nothing_, own.thread(), ended);
  const auto first = threads_.begin() + current_ / kWarpgroup * kWarpgroup;
  std::for_each(first, first + kWarpgroup,
                [&](Thread& thread) { thread.known = joiner_(thread.known, known); });
}

void Launch::change_registers(int count, bool takes, Site site) {
  Registers& own = registers_[static_cast<std::size_t>(current_ / kWarpgroup)];
  if (grid_.registers == 0) return;
  if (count % 8 != 0 || count < 24 || count > 256 ||
      (takes ? count < own.count : count > own.count))
    return report(site, "the warpgroup has " + std::to_string(own.count) + " registers a thread; " +
                            std::to_string(count) + " are wrong");
  own.wanted = count;
  if (!takes) {
    free_registers_[static_cast<std::size_t>(rank())] += own.count - count;
    own.count = count;
  }
}

void Launch::wait_registers(Site site) {
  if (grid_.registers == 0) return;
  me().site = site;
  me().waits = Waits::kRegisters;
  if (!goes_on(static_cast<std::size_t>(current_))) Fiber::pause();
}

void Launch::grant_registers(std::size_t warpgroup) {
  Registers& own = registers_[warpgroup];
  const auto block = warpgroup * kWarpgroup / grid_.threads;
  const int more = own.wanted - own.count;
  if (more > free_registers_[block]) return;
  free_registers_[block] -= more;
  own.count = own.wanted;
}

}  // namespace dmuon::kernels::cuda::emulator
