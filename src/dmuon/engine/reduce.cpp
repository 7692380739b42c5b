#include "dmuon/engine/reduce.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>

namespace dmuon::engine {
namespace {

at::Tensor part(const at::Tensor& packed, const Segment& segment) {
  return packed.narrow(0, segment.begin, segment.size());
}

SegmentSum reduce_by_backend(Group& group, const at::Tensor& packed,
                             const std::vector<Segment>& segments, const std::string& what) {
  std::vector<Pending> pending;
  for (int root = 0; root < group.size(); ++root) {
    pending.push_back(
        group.reduce_sum(part(packed, segments[static_cast<std::size_t>(root)]), root, what));
  }
  for (Pending& operation : pending) operation.wait();
  return {part(packed, segments[static_cast<std::size_t>(group.rank())]), nullptr};
}

/// Receives this rank's segment from each peer in turn into a few slots, and adds it.
class Inbox {
 public:
  Inbox(Group& group, std::int64_t segment, std::int64_t most_elements, at::ScalarType dtype,
        const std::shared_ptr<BufferPool>& pool, const std::string& what)
      : group_(group), segment_(segment), what_(what) {
    const std::int64_t peers = group.size() - 1;
    slots_ = static_cast<int>(std::clamp<std::int64_t>(most_elements / segment, 1, peers));
    storage_ = std::make_unique<PackedBuffer>(pool, segment * slots_, dtype);
    storage_->allocate();
    pending_.resize(static_cast<std::size_t>(slots_));
    for (int i = 0; i < slots_; ++i) post(i);
  }

  void add_all_to(at::Tensor& sum) {
    for (int i = 0; i < group_.size() - 1; ++i) {
      pending_[static_cast<std::size_t>(i % slots_)].wait();
      sum.add_(slot(i));
      if (i + slots_ < group_.size() - 1) post(i + slots_);
    }
  }

 private:
  at::Tensor slot(int i) const {
    const std::int64_t begin = (i % slots_) * segment_;
    return storage_->slice(begin, begin + segment_);
  }

  // Peers in ring order from the next rank, so that not all send to one member at once.
  void post(int i) {
    const int peer = (group_.rank() + 1 + i) % group_.size();
    pending_[static_cast<std::size_t>(i % slots_)] = group_.receive(slot(i), peer, what_);
  }

  Group& group_;
  std::int64_t segment_;
  const std::string& what_;
  int slots_ = 0;
  std::unique_ptr<PackedBuffer> storage_;
  std::vector<Pending> pending_;
};

}  // namespace

SegmentSum reduce_segments(Group& group, const at::Tensor& packed,
                           const std::vector<Segment>& segments,
                           const std::shared_ptr<BufferPool>& pool, const std::string& what) {
  const Segment own = segments[static_cast<std::size_t>(group.rank())];
  if (group.size() == 1) return {part(packed, own), nullptr};
  if (!group.free_point_to_point()) return reduce_by_backend(group, packed, segments, what);

  std::vector<Pending> sends;
  for (int i = 1; i < group.size(); ++i) {
    const int peer = (group.rank() + group.size() - i) % group.size();
    sends.push_back(group.send(part(packed, segments[static_cast<std::size_t>(peer)]), peer, what));
  }
  SegmentSum sum{part(packed, own), nullptr};
  if (own.size() > 0) {
    Inbox inbox(group, own.size(), packed.numel(), packed.scalar_type(), pool, what);
    if (packed.scalar_type() != at::kFloat) {
      sum.storage = std::make_unique<PackedBuffer>(pool, own.size(), at::kFloat);
      sum.storage->allocate();
      sum.storage->flat().copy_(sum.values);
      sum.values = sum.storage->flat();
    }
    inbox.add_all_to(sum.values);
  }
  for (Pending& send : sends) send.wait();
  return sum;
}

}  // namespace dmuon::engine
