#include "dmuon/engine/reduce.h"

#include <algorithm>
#include <cstddef>

namespace dmuon::engine {
namespace {

// Sums are made in strides of 1 MB of fp32: they stay in a cache, and no second buffer is needed.
constexpr std::int64_t kStride = std::int64_t{1} << 18;

at::Tensor part(const at::Tensor& packed, const Segment& segment) {
  return packed.narrow(0, segment.begin, segment.size());
}

std::int64_t num_elements(const std::vector<Segment>& segments) {
  std::int64_t total = 0;
  for (const Segment& segment : segments) total += segment.size();
  return total;
}

// The largest pieces of a segment of which one from each peer fits into as much as the buffer.
std::int64_t piece_size(std::int64_t segment, std::int64_t buffer, int group_size) {
  const std::int64_t peers = group_size - 1;
  if (segment * peers <= buffer) return segment;
  const std::int64_t room = std::max<std::int64_t>(buffer / peers, 1);
  const std::int64_t num_pieces = (segment + room - 1) / room;
  return (segment + num_pieces - 1) / num_pieces;
}

std::vector<Segment> pieces_of(const Segment& segment, std::int64_t buffer, int group_size) {
  std::vector<Segment> pieces;
  if (segment.size() == 0) return pieces;
  const std::int64_t step = piece_size(segment.size(), buffer, group_size);
  for (std::int64_t begin = segment.begin; begin < segment.end; begin += step) {
    pieces.push_back({begin, std::min(begin + step, segment.end)});
  }
  return pieces;
}

void reduce_by_backend(Group& group, const at::Tensor& packed, const std::vector<Segment>& segments,
                       const TakeSum& take, const std::string& what) {
  const double scale = packed.scalar_type() == at::kHalf ? group.size() : 1;
  at::Tensor terms = packed;
  if (scale != 1) terms.div_(scale);
  std::vector<Pending> pending;
  for (int root = 0; root < group.size(); ++root) {
    pending.push_back(
        group.reduce_sum(part(packed, segments[static_cast<std::size_t>(root)]), root, what));
  }
  for (Pending& operation : pending) operation.wait();
  const Segment own = segments[static_cast<std::size_t>(group.rank())];
  for (std::int64_t begin = own.begin; begin < own.end; begin += kStride) {
    const std::int64_t size = std::min(kStride, own.end - begin);
    at::Tensor sum =
        packed.narrow(0, begin, size).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    if (scale != 1) sum.mul_(scale);
    take(begin - own.begin, sum);
  }
}

}  // namespace

std::int64_t inbox_elements(const Group& group, const std::vector<Segment>& segments) {
  if (group.size() == 1 || !group.free_point_to_point()) return 0;
  const std::int64_t own = segments[static_cast<std::size_t>(group.rank())].size();
  if (own == 0) return 0;
  return (group.size() - 1) * piece_size(own, num_elements(segments), group.size());
}

void reduce_segments(Group& group, const at::Tensor& packed, const std::vector<Segment>& segments,
                     const at::Tensor& inbox, const TakeSum& take, const std::string& what) {
  if (group.size() > 1 && !group.free_point_to_point()) {
    reduce_by_backend(group, packed, segments, take, what);
    return;
  }
  const std::int64_t buffer = num_elements(segments);
  const int num_peers = group.size() - 1;
  std::vector<Pending> sends;
  for (int i = 1; i <= num_peers; ++i) {
    const int peer = (group.rank() + group.size() - i) % group.size();
    for (const Segment& piece :
         pieces_of(segments[static_cast<std::size_t>(peer)], buffer, group.size())) {
      sends.push_back(group.send(part(packed, piece), peer, what));
    }
  }
  const Segment own = segments[static_cast<std::size_t>(group.rank())];
  const std::int64_t slot = num_peers == 0 ? own.size() : inbox.numel() / num_peers;
  for (const Segment& piece : pieces_of(own, buffer, std::max(group.size(), 2))) {
    // Peers in ring order from the next rank, so that not all send to one member at once.
    std::vector<Pending> arrivals;
    for (int i = 0; i < num_peers; ++i) {
      arrivals.push_back(group.receive(inbox.narrow(0, i * slot, piece.size()),
                                       (group.rank() + 1 + i) % group.size(), what));
    }
    for (Pending& arrival : arrivals) arrival.wait();
    for (std::int64_t begin = 0; begin < piece.size(); begin += kStride) {
      const std::int64_t size = std::min(kStride, piece.size() - begin);
      const auto term = [&](int rank) {
        if (rank == group.rank()) return packed.narrow(0, piece.begin + begin, size);
        const int arrived = (rank - group.rank() - 1 + group.size()) % group.size();
        return inbox.narrow(0, arrived * slot + begin, size);
      };
      at::Tensor sum = term(0).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      for (int rank = 1; rank < group.size(); ++rank) sum.add_(term(rank));
      take(piece.begin - own.begin + begin, sum);
    }
  }
  for (Pending& send : sends) send.wait();
}

}  // namespace dmuon::engine
