#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/layout/packed_size.h"
#include "dmuon/wire/exchange.h"

namespace dmuon::wire {
namespace {

// Sums are made in strides of 1 MB of fp32, which stay in a cache and need no second buffer.
constexpr std::int64_t kStride = std::int64_t{1} << 18;

std::int64_t num_elements(const std::vector<layout::Part>& parts) {
  std::int64_t total = 0;
  for (const layout::Part& part : parts) total += part.size();
  return total;
}

// Returns pieces of a part that fit into its member's inbox.
std::vector<layout::Segment> pieces_of(const layout::Part& part, std::int64_t buffer,
                                       int group_size) {
  std::vector<layout::Segment> pieces;
  const std::int64_t step = layout::piece_elements(part.size(), buffer, group_size);
  for (const layout::Segment& segment : part.segments) {
    for (std::int64_t begin = segment.begin; begin < segment.end; begin += step)
      pieces.push_back({begin, std::min(begin + step, segment.end)});
  }
  return pieces;
}

// One reduction at one member.
class Reduction {
 public:
  Reduction(Group* group, const at::Tensor& packed, const std::vector<layout::Part>& parts,
            const at::Tensor& inbox, TakeSum take, std::string what)
      : group_(group),
        packed_(packed),
        inbox_(inbox),
        take_(std::move(take)),
        what_(std::move(what)),
        num_peers_(group->size() - 1) {
    const layout::Part& own = parts[static_cast<std::size_t>(group_->rank())];
    const std::int64_t buffer = num_elements(parts);
    slot_ = num_peers_ == 0 ? own.size() : inbox_.numel() / num_peers_;
    pieces_ = pieces_of(own, buffer, group_->size());
    fits_ = own.size() <= slot_;
    for (int i = 1; i <= num_peers_; ++i) {
      const int peer = (group_->rank() + group_->size() - i) % group_->size();
      const layout::Part& part = parts[static_cast<std::size_t>(peer)];
      for (const layout::Segment& piece : pieces_of(part, buffer, group_->size()))
        sends_.push_back(group_->send(packed_.narrow(0, piece.begin, piece.size()), peer, what_));
    }
    receive_what_fits();
  }

  void finish() {
    while (num_taken_ < pieces_.size()) {
      take_next();
      receive_what_fits();
    }
    wait_all(std::move(sends_));
  }

 private:
  // All pieces, or one if the inbox has no room for all.
  void receive_what_fits() {
    while (arrivals_.size() < pieces_.size() && (fits_ || arrivals_.size() == num_taken_))
      receive(pieces_[arrivals_.size()]);
  }

  void receive(const layout::Segment& piece) {
    places_.push_back(fits_ ? received_ : 0);
    std::vector<Pending>& arrivals = arrivals_.emplace_back();
    // Ring order: not all members send to one member at once.
    for (int i = 0; i < num_peers_; ++i) {
      arrivals.push_back(group_->receive(inbox_.narrow(0, i * slot_ + places_.back(), piece.size()),
                                         (group_->rank() + 1 + i) % group_->size(), what_));
    }
    received_ += piece.size();
  }

  void take_next() {
    const layout::Segment& piece = pieces_[num_taken_];
    wait_all(std::move(arrivals_[num_taken_]));
    const auto term = [&](int rank, std::int64_t begin, std::int64_t size) {
      if (rank == group_->rank()) return packed_.narrow(0, piece.begin + begin, size);
      const int arrived = (rank - group_->rank() - 1 + group_->size()) % group_->size();
      return inbox_.narrow(0, arrived * slot_ + places_[num_taken_] + begin, size);
    };
    for (std::int64_t begin = 0; begin < piece.size(); begin += kStride) {
      const std::int64_t size = std::min(kStride, piece.size() - begin);
      at::Tensor sum = term(0, begin, size).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      for (int rank = 1; rank < group_->size(); ++rank) sum.add_(term(rank, begin, size));
      take_(taken_, sum, 1.0 / group_->size());
      taken_ += size;
    }
    ++num_taken_;
  }

  Group* group_;
  at::Tensor packed_, inbox_;
  TakeSum take_;
  std::string what_;
  int num_peers_;
  std::int64_t slot_ = 0;  // elements of the inbox for each peer
  std::vector<layout::Segment> pieces_;
  bool fits_ = false;                           // all pieces, into a slot
  std::vector<std::int64_t> places_;            // [pieces received] in a slot
  std::vector<std::vector<Pending>> arrivals_;  // likewise, from each peer
  std::vector<Pending> sends_;
  std::int64_t received_ = 0;  // elements, also of what is still on its way
  std::int64_t taken_ = 0;     // elements
  std::size_t num_taken_ = 0;  // pieces
};

class PeerExchange final : public Exchange {
 public:
  std::int64_t inbox_elements(const Group& group,
                              const std::vector<layout::Part>& parts) const override {
    const std::int64_t own = parts[static_cast<std::size_t>(group.rank())].size();
    return layout::inbox_elements(own, num_elements(parts), group.size());
  }

  Rest reduce(Group& group, const at::Tensor& packed, const std::vector<layout::Part>& parts,
              const at::Tensor& inbox, TakeSum take, const std::string& what) const override {
    const auto reduction =
        std::make_shared<Reduction>(&group, packed, parts, inbox, std::move(take), what);
    return [reduction] { reduction->finish(); };
  }
};

}  // namespace

const Exchange& peer_exchange() {
  static const PeerExchange kExchange;
  return kExchange;
}

}  // namespace dmuon::wire
