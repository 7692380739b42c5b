#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

namespace dmuon::core {

/// Blocks of memory that wait for their next use, by size. What the engine keeps and what a plan
/// counts follow the same rule.
template <typename Block>
class IdleBlocks {
 public:
  /// The smallest of at least `num_bytes` and at most twice as many, with its size; none where
  /// there is none.
  std::optional<std::pair<std::int64_t, Block>> take(std::int64_t num_bytes) {
    const auto found = blocks_.lower_bound(num_bytes);
    if (found == blocks_.end() || found->first - num_bytes > num_bytes) return std::nullopt;
    std::pair<std::int64_t, Block> block(found->first, std::move(found->second));
    blocks_.erase(found);
    return block;
  }

  void give(std::int64_t num_bytes, Block block) { blocks_.emplace(num_bytes, std::move(block)); }

  /// Frees the largest ones, until that is at least `num_bytes` or none is left.
  /// @return  how many bytes that were.
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
