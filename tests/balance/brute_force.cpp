#include "tests/balance/brute_force.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace dmuon::balance {
namespace {

constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max();

// Batches in descending order of their index, so that each set of them comes once.
Nanoseconds cheapest_split(const CostedShape& shape, int k, std::size_t num_batches) {
  if (k == 0) return 0;
  Nanoseconds least = kNever;
  for (std::size_t i = 0; i < num_batches; ++i) {
    const BatchTime& batch = shape.batches[i];
    if (batch.size > k) continue;
    const Nanoseconds rest = cheapest_split(shape, k - batch.size, i + 1);
    if (rest != kNever) least = std::min(least, rest + batch.ns);
  }
  return least;
}

class Enumeration {
 public:
  explicit Enumeration(const Instance& instance) : instance_(instance) {
    for (const CostedShape& shape : instance.shapes) {
      std::vector<Nanoseconds>& times = times_.emplace_back();
      for (int k = 0; k <= shape.num_matrices; ++k) {
        times.push_back(balance::cheapest_split(shape, k));
      }
    }
    const auto num_owners = static_cast<std::size_t>(instance.num_owners);
    loads_.assign(num_owners, 0);
    bytes_.assign(num_owners, 0);
  }

  Nanoseconds optimum() {
    if (!instance_.shapes.empty()) give(0, 0, instance_.shapes.front().num_matrices);
    return instance_.shapes.empty() ? 0 : least_ == kNever ? -1 : least_;
  }

 private:
  // To owner o and the ones after it, `left` matrices of shape s.
  void give(std::size_t s, std::size_t o, int left) {
    if (o + 1 == loads_.size()) {
      give_some(s, o, left, 0);
      return;
    }
    for (int k = 0; k <= left; ++k) give_some(s, o, k, left - k);
  }

  void give_some(std::size_t s, std::size_t o, int k, int left) {
    const Nanoseconds ns = times_[s][static_cast<std::size_t>(k)];
    const std::int64_t bytes = k * instance_.shapes.values()[s].bytes;
    loads_[o] += ns;
    bytes_[o] += bytes;
    if (bytes_[o] <= instance_.max_bytes) go_on(s, o, left);
    loads_[o] -= ns;
    bytes_[o] -= bytes;
  }

  void go_on(std::size_t s, std::size_t o, int left) {
    if (o + 1 < loads_.size()) {
      give(s, o + 1, left);
    } else if (s + 1 < times_.size()) {
      give(s + 1, 0, instance_.shapes.values()[s + 1].num_matrices);
    } else {
      least_ = std::min(least_, *std::max_element(loads_.begin(), loads_.end()));
    }
  }

  const Instance& instance_;
  std::vector<std::vector<Nanoseconds>> times_;  // [shapes][matrices + 1]
  std::vector<Nanoseconds> loads_;               // [owners]
  std::vector<std::int64_t> bytes_;              // [owners]
  Nanoseconds least_ = kNever;
};

}  // namespace

Nanoseconds cheapest_split(const CostedShape& shape, int k) {
  return cheapest_split(shape, k, shape.batches.size());
}

Nanoseconds optimum(const Instance& instance) { return Enumeration(instance).optimum(); }

}  // namespace dmuon::balance
