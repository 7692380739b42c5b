#include <algorithm>
#include <cstddef>
#include <utility>

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

class PeerExchange final : public Exchange {
 public:
  std::int64_t inbox_elements(const Group& group,
                              const std::vector<layout::Part>& parts) const override {
    const std::int64_t own = parts[static_cast<std::size_t>(group.rank())].size();
    return layout::inbox_elements(own, num_elements(parts), group.size());
  }

  void reduce(Group& group, const at::Tensor& packed, const std::vector<layout::Part>& parts,
              const at::Tensor& inbox, const TakeSum& take,
              const std::string& what) const override {
    std::vector<Pending> sends = send_to_peers(&group, packed, parts, what);
    const std::int64_t buffer = num_elements(parts);
    const int num_peers = group.size() - 1;
    const layout::Part& own = parts[static_cast<std::size_t>(group.rank())];
    const std::int64_t slot = num_peers == 0 ? own.size() : inbox.numel() / num_peers;
    std::int64_t taken = 0;
    for (const layout::Segment& piece : pieces_of(own, buffer, group.size())) {
      // Ring order: not all members send to one member at once.
      std::vector<Pending> arrivals;
      for (int i = 0; i < num_peers; ++i) {
        arrivals.push_back(group.receive(inbox.narrow(0, i * slot, piece.size()),
                                         (group.rank() + 1 + i) % group.size(), what));
      }
      wait_all(std::move(arrivals));
      const auto term = [&](int rank, std::int64_t begin, std::int64_t size) {
        if (rank == group.rank()) return packed.narrow(0, piece.begin + begin, size);
        const int arrived = (rank - group.rank() - 1 + group.size()) % group.size();
        return inbox.narrow(0, arrived * slot + begin, size);
      };
      for (std::int64_t begin = 0; begin < piece.size(); begin += kStride) {
        const std::int64_t size = std::min(kStride, piece.size() - begin);
        at::Tensor sum = term(0, begin, size).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
        for (int rank = 1; rank < group.size(); ++rank) sum.add_(term(rank, begin, size));
        take(taken, sum, 1.0 / group.size());
        taken += size;
      }
    }
    wait_all(std::move(sends));
  }

 private:
  static std::vector<Pending> send_to_peers(Group* group, const at::Tensor& packed,
                                            const std::vector<layout::Part>& parts,
                                            const std::string& what) {
    std::vector<Pending> sends;
    for (int i = 1; i < group->size(); ++i) {
      const int peer = (group->rank() + group->size() - i) % group->size();
      const layout::Part& part = parts[static_cast<std::size_t>(peer)];
      for (const layout::Segment& piece : pieces_of(part, num_elements(parts), group->size()))
        sends.push_back(group->send(packed.narrow(0, piece.begin, piece.size()), peer, what));
    }
    return sends;
  }
};

}  // namespace

const Exchange& peer_exchange() {
  static const PeerExchange kExchange;
  return kExchange;
}

}  // namespace dmuon::wire
