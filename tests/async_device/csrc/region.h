#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace async_device {

/// The bytes of a block that a strided tensor covers: runs of `run` bytes, repeated along
/// dimensions.
struct Region {
  struct Dimension {
    int64_t count;   // at least 2
    int64_t stride;  // bytes, more than 0
    bool operator==(const Dimension&) const = default;
  };

  int64_t begin = 0;                            // bytes from the start of the block
  int64_t run = 0;                              // bytes; 0 if the region is empty
  c10::SmallVector<Dimension, 3> dimensions{};  // by rising stride; none: `run` is all there is

  /// Returns the offset just past the last byte.
  int64_t end() const;

  bool operator==(const Region&) const = default;
};

/// @param sizes, strides  as a tensor's, in elements.
/// @param offset          of the first element from the start of the block, in elements.
/// @param item            bytes of an element.
Region make_region(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, int64_t item);

/// All bytes in [begin, end).
Region make_region(int64_t begin, int64_t end);

/// True if any byte is in both. Exact, unless both have more than 65536 runs; then true if the
/// ranges from their first bytes to their last overlap.
bool overlap(const Region& a, const Region& b);

/// True if every byte of `inner` is surely in `outer`; false if that takes work to find out.
bool covers(const Region& outer, const Region& inner);

}  // namespace async_device
