#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

namespace dmuon::core {

/// Freed blocks of memory that wait for their next use, by size. The engine and a plan's count of
/// memory follow this same rule. Not thread-safe.
template <typename Block>
class IdleBlocks {
 public:
  /// Removes and returns the smallest block of at least `num_bytes` and at most twice as many, with
  /// its size; std::nullopt if there is none.
  std::optional<std::pair<std::int64_t, Block>> take(std::int64_t num_bytes) {
    const auto found = blocks_.lower_bound(num_bytes);
    if (found == blocks_.end() || found->first - num_bytes > num_bytes) return std::nullopt;
    std::pair<std::int64_t, Block> block(found->first, std::move(found->second));
    blocks_.erase(found);
    return block;
  }

  void give(std::int64_t num_bytes, Block block) { blocks_.emplace(num_bytes, std::move(block)); }

  /// Frees the largest blocks until at least `num_bytes` are freed or no block is left.
  /// @return  the number of freed bytes.
  std::int64_t free_at_least(std::int64_t num_bytes) {
    std::int64_t freed = 0;
    while (freed < num_bytes && !blocks_.empty()) {
      const auto largest = std::prev(blocks_.end());
      freed += largest->first;
      blocks_.erase(largest);
    }
    return freed;
  }

 private:
  std::multimap<std::int64_t, Block> blocks_;
};

}  // namespace dmuon::core
