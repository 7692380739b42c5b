#include "tests/kernels/cuda/emulator/mbarriers.h"

namespace dmuon::kernels::cuda::emulator {
namespace {

std::string name_of(int block, int word) {
  return "the mbarrier at shared word " + std::to_string(word) + " of block " +
         std::to_string(block) + " of the cluster";
}

}  // namespace

void Mbarriers::reset(int first_thread, const Known& nothing) {
  all_.clear();
  first_thread_ = first_thread;
  nothing_ = nothing;
}

void Mbarriers::init(int block, int word, std::uint32_t count, const Now& now, Site site) {
  if (count == 0 || count >= 1U << 20) report_.error(site, "an mbarrier counts 1 to 2^20 - 1");
  if (all_.size() == kMostMbarriers) return report_.error(site, "too many mbarriers");
  if (!shared_[static_cast<std::size_t>(block)].make_mbarrier(word, now, site)) return;
  Mbarrier& made = all_[{block, word}];
  made.index = static_cast<int>(all_.size()) - 1;
  made.count = made.missing = count;
  made.made = now.moment;
  made.arrived = made.known = nothing_;
  made.line = site.line;
}

void Mbarriers::fence(const Now& now) {
  for (auto& [place, mbarrier] : all_)
    mbarrier.fenced = mbarrier.fenced || mbarrier.made.thread == now.moment.thread;
}

Mbarrier* Mbarriers::find(int block, int word, int user, bool for_copy, const Now& now, Site site) {
  const auto found = all_.find({block, word});
  if (found == all_.end()) {
    report_.error(site, "there is no mbarrier at shared word " + std::to_string(word) +
                            " of block " + std::to_string(block) + " of the cluster");
    return nullptr;
  }
  Mbarrier& mbarrier = found->second;
  if (!now.knows(mbarrier.made)) {
    report_.error(site, "race: uses " + name_of(block, word) + ", initialised by " +
                            report_.who(mbarrier.made, mbarrier.line) + " without a barrier");
    return nullptr;
  }
  if (!mbarrier.fenced && (for_copy || block != user)) {
    report_.error(site, "no fence after the initialisation of " + name_of(block, word));
    return nullptr;
  }
  return &mbarrier;
}

void Mbarriers::arrive(Mbarrier& mbarrier, std::uint32_t bytes, const Known& known, Site site) {
  if (mbarrier.missing == 0) {
    return report_.error(site, "more threads arrive at the mbarrier than the " +
                                   std::to_string(mbarrier.count) + " that it counts");
  }
  if (bytes >= 1U << 20) report_.error(site, "an mbarrier expects less than 2^20 bytes");
  mbarrier.line = site.line;
  mbarrier.bytes += bytes;
  mbarrier.arrived = joined(mbarrier.arrived, known);
  --mbarrier.missing;
  end_phase(mbarrier);
}

Moment Mbarriers::begin_copy(Mbarrier& mbarrier, int cluster) const {
  return {cluster, first_thread_ + mbarrier.index, ++mbarrier.copies};
}

void Mbarriers::end_copy(Mbarrier& mbarrier, std::uint32_t bytes, const Moment& copy, Site site) {
  mbarrier.bytes -= bytes;
  if (mbarrier.missing == 0 && mbarrier.bytes < 0)
    report_.error(site, "more bytes arrive at the mbarrier than are expected");
  mbarrier.arrived = joined(mbarrier.arrived, copy.thread, copy.time);
  end_phase(mbarrier);
}

void Mbarriers::end_phase(Mbarrier& mbarrier) {
  if (mbarrier.missing > 0 || mbarrier.bytes != 0) return;
  ++mbarrier.phases;
  mbarrier.missing = mbarrier.count;
  mbarrier.known = mbarrier.arrived;
}

void Mbarriers::check_ended() const {
  for (const auto& [place, mbarrier] : all_) {
    if (mbarrier.bytes == 0) continue;
    const bool more = mbarrier.bytes < 0;
    report_.error({"", 0}, name_of(place.first, place.second) + " ends with " +
                               std::to_string(more ? -mbarrier.bytes : mbarrier.bytes) +
                               (more ? " bytes that nobody expected" : " expected bytes missing"));
  }
}

}  // namespace dmuon::kernels::cuda::emulator
