#include "async_device/csrc/region.h"

#include <algorithm>

namespace async_device {
namespace {

constexpr int64_t kMaxRuns = 65536;

using Dimensions = c10::ArrayRef<Region::Dimension>;

Dimensions without_last(Dimensions dimensions) {
  return dimensions.slice(0, dimensions.size() - 1);
}

int64_t extent(Dimensions dimensions, int64_t run) {
  for (const auto& dimension : dimensions) run += (dimension.count - 1) * dimension.stride;
  return run;
}

int64_t num_runs(const Region& region) {
  int64_t runs = 1;
  for (const auto& dimension : region.dimensions) runs *= dimension.count;
  return runs;
}

/// True if a byte of [low, high), counted from the region's first byte, is in the region. Checks
/// only the repetitions of the outermost dimension whose extent meets the range.
bool meets(Dimensions dimensions, int64_t run, int64_t low, int64_t high) {
  if (high <= 0 || low >= extent(dimensions, run)) return false;
  if (dimensions.empty()) return true;
  const auto [count, stride] = dimensions.back();
  const Dimensions inner = without_last(dimensions);
  const int64_t inner_extent = extent(inner, run);
  const int64_t below = low - inner_extent;  // a repetition that begins here ends before the range
  const int64_t first = below < 0 ? 0 : below / stride + 1;
  const int64_t last = std::min(count - 1, (high - 1) / stride);
  for (int64_t i = first; i <= last; ++i) {
    if (meets(inner, run, low - i * stride, high - i * stride)) return true;
  }
  return false;
}

/// Calls `visit` with the first byte of each run until it returns true. Returns true if it did.
template <typename Visit>
bool any_run(Dimensions dimensions, int64_t begin, const Visit& visit) {
  if (dimensions.empty()) return visit(begin);
  for (int64_t i = 0; i < dimensions.back().count; ++i) {
    if (any_run(without_last(dimensions), begin + i * dimensions.back().stride, visit)) return true;
  }
  return false;
}

}  // namespace

int64_t Region::end() const { return begin + extent(dimensions, run); }

Region make_region(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, int64_t item) {
  Region region{offset * item, item};
  c10::SmallVector<Region::Dimension, 8> all;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) region.run = 0;
    if (sizes[i] > 1 && strides[i] > 0) all.push_back({sizes[i], strides[i] * item});
  }
  if (region.run == 0) return region;
  std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.stride < b.stride; });
  for (const auto& dimension : all) {
    auto& kept = region.dimensions;
    if (kept.empty() && dimension.stride <= region.run) {
      region.run += (dimension.count - 1) * dimension.stride;
    } else if (!kept.empty() && dimension.stride == kept.back().stride * kept.back().count) {
      kept.back().count *= dimension.count;
    } else {
      kept.push_back(dimension);
    }
  }
  return region;
}

Region make_region(int64_t begin, int64_t end) { return {begin, end - begin}; }

bool overlap(const Region& a, const Region& b) {
  if (a.run == 0 || b.run == 0 || a.end() <= b.begin || b.end() <= a.begin) return false;
  const bool a_first = num_runs(a) <= num_runs(b);
  const Region& few = a_first ? a : b;
  const Region& many = a_first ? b : a;
  if (num_runs(few) > kMaxRuns) return true;
  return any_run(few.dimensions, few.begin - many.begin, [&](int64_t begin) {
    return meets(many.dimensions, many.run, begin, begin + few.run);
  });
}

bool covers(const Region& outer, const Region& inner) {
  if (outer.dimensions.empty()) return outer.begin <= inner.begin && inner.end() <= outer.end();
  return outer == inner;
}

}  // namespace async_device
