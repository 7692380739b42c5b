#include "tests/kernels/cuda/emulator/order.h"

#include <algorithm>

namespace dmuon::kernels::cuda::emulator {
namespace {

std::uint32_t time_of(const Known& known, int thread) {
  return known == nullptr ? 0 : (*known)[static_cast<std::size_t>(thread)];
}

// True if the two, of one cluster, are ordered: `then` came first.
bool precedes(const Moment& then, const Now& now) {
  return then.thread == now.moment.thread || time_of(*now.known, then.thread) >= then.time;
}

}  // namespace

Known joined(const Known& a, const Known& b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  auto both = std::make_shared<std::vector<std::uint32_t>>(*a);
  std::ranges::transform(*both, *b, both->begin(),
                         [](std::uint32_t x, std::uint32_t y) { return std::max(x, y); });
  return both;
}

Known joined(const Known& known, int thread, std::uint32_t time) {
  auto more = std::make_shared<std::vector<std::uint32_t>>(*known);
  auto& own = (*more)[static_cast<std::size_t>(thread)];
  own = std::max(own, time);
  return more;
}

Known Joiner::operator()(const Known& a, const Known& b) {
  if (both_ == nullptr || a != a_ || b != b_) {
    a_ = a;
    b_ = b;
    both_ = joined(a, b);
  }
  return both_;
}

void Released::add(int cluster, const Known& known) {
  Known& all = by_cluster_[cluster];
  all = joined(all, known);
}

void Released::add(const Released& other) {
  for (const auto& [cluster, known] : other.by_cluster_) add(cluster, known);
}

bool Released::covers(const Moment& then) const {
  const auto known = by_cluster_.find(then.cluster);
  return known != by_cluster_.end() && time_of(known->second, then.thread) >= then.time;
}

bool Now::knows(const Moment& then) const {
  if (then.cluster == moment.cluster && precedes(then, *this)) return true;
  return acquired->covers(then, *this);
}

bool Acquired::covers(const Moment& then, const Now& now) const {
  return std::ranges::any_of(
      all_, [&](const One& one) { return precedes(one.by, now) && one.released.covers(then); });
}

Released Acquired::known(const Now& now) const {
  Released known;
  for (const One& one : all_) {
    if (precedes(one.by, now)) known.add(one.released);
  }
  return known;
}

void Reads::note(const Moment& reader, const Now& now) {
  if (few_[0].cluster != reader.cluster) {
    few_[0] = reader;
    few_[1] = {};
    many_.reset();
  }
  if (many_ == nullptr) {
    for (Moment& one : few_) {
      // Who knows the new reader will know one that the reader knows.
      if (one.cluster >= 0 && one.thread != reader.thread && !now.knows(one)) continue;
      one = reader;
      return;
    }
    many_ = std::make_unique<std::vector<std::uint32_t>>((*now.known)->size());
    for (const Moment& one : few_) (*many_)[static_cast<std::size_t>(one.thread)] = one.time;
  }
  (*many_)[static_cast<std::size_t>(reader.thread)] = reader.time;
}

std::optional<Moment> Reads::unknown(const Now& now) const {
  if (many_ == nullptr) {
    for (const Moment& one : few_)
      if (one.cluster >= 0 && !now.knows(one)) return one;
    return std::nullopt;
  }
  for (std::size_t i = 0; i < many_->size(); ++i) {
    const Moment one{few_[0].cluster, static_cast<int>(i), (*many_)[i]};
    if (one.time > 0 && !now.knows(one)) return one;
  }
  return std::nullopt;
}

}  // namespace dmuon::kernels::cuda::emulator
