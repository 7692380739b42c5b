#include "async_device/csrc/scheduler.h"

#include "async_device/csrc/settings.h"

namespace async_device {
namespace {

/// The stream whose first entry brings `stream` on; null if that one runs already.
Stream* first_needed_by(Stream* stream) {
  while (!stream->entries.empty() && !stream->is_busy) {
    const Entry& first = stream->entries.front();
    if (first.kind != Entry::Kind::kWait || first.event->is_done) return stream;
    stream = first.event->stream;
  }
  return nullptr;
}

template <typename Streams>
Stream* first_that_can_run(Streams begin, Streams end) {
  for (auto stream = begin; stream != end; ++stream) {
    if (stream->can_run()) return &*stream;
  }
  return nullptr;
}

}  // namespace

void Scheduler::seed(uint64_t seed) {
  random_.seed(seed);
  eager_.seed(seed);
  priorities_.clear();
}

int64_t Scheduler::eagerness() {
  if (settings().order != Order::kRandom || eager_() % 16 != 0) return 0;
  return static_cast<int64_t>(eager_() % 8);
}

Stream* Scheduler::pick(std::deque<Stream>& streams, const std::vector<EventPtr>& targets,
                        bool is_idle) {
  switch (settings().order) {
    case Order::kComputeFirst:
      return pick_needed(streams, targets, is_idle);
    case Order::kSideFirst:
      return first_that_can_run(streams.rbegin(), streams.rend());
    case Order::kRandom:
      return pick_at_random(streams);
    case Order::kIssueOrder:
      return pick_by_issue(streams);
  }
  return nullptr;
}

Stream* Scheduler::pick_by_issue(std::deque<Stream>& streams) const {
  Stream* first = nullptr;
  for (Stream& stream : streams) {
    if (stream.is_busy) return nullptr;
    if (stream.entries.empty()) continue;
    if (first == nullptr || stream.entries.front().sequence < first->entries.front().sequence) {
      first = &stream;
    }
  }
  return first != nullptr && first->can_run() ? first : nullptr;
}

Stream* Scheduler::pick_needed(std::deque<Stream>& streams, const std::vector<EventPtr>& targets,
                               bool is_idle) const {
  for (const EventPtr& target : targets) {
    if (target->is_done) continue;
    if (Stream* stream = first_needed_by(target->stream)) return stream;
  }
  // Other ranks may wait for entries that no thread here needs yet.
  if (!targets.empty() && !is_idle) return nullptr;
  return first_that_can_run(streams.begin(), streams.end());
}

Stream* Scheduler::pick_at_random(std::deque<Stream>& streams) {
  if (priorities_.size() != streams.size() || random_() % 8 == 0) {
    priorities_.resize(streams.size());
    for (uint64_t& priority : priorities_) priority = random_() % 1000;
  }
  Stream* best = nullptr;
  for (Stream& stream : streams) {
    const auto priority = [this](const Stream& of) {
      return priorities_[static_cast<size_t>(of.id)];
    };
    if (stream.can_run() && (best == nullptr || priority(stream) > priority(*best))) {
      best = &stream;
    }
  }
  return best;
}

}  // namespace async_device
