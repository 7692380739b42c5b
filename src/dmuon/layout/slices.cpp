#include "dmuon/layout/slices.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "dmuon/core/error.h"

namespace dmuon::layout {
namespace {

using Sizes = std::vector<std::int64_t>;

std::int64_t product(Sizes::const_iterator first, Sizes::const_iterator last) {
  return std::accumulate(first, last, std::int64_t{1}, std::multiplies<>());
}

// Returns the indices of the cut dimension that the rank has.
Part indices_of(const Sizes& sizes, const Cut& cut, int num_ranks, int rank) {
  const auto num_dimensions = static_cast<int>(sizes.size());
  core::require(cut.dimension >= 0 && cut.dimension < num_dimensions,
                "Cut: dimension must be in [0, ", num_dimensions, "); got ", cut.dimension);
  const std::int64_t least = std::ranges::min(sizes);
  core::require(least >= 1, "Cut: sizes of the leaf must be >= 1; got ", least);
  const std::int64_t size = sizes[static_cast<std::size_t>(cut.dimension)];
  core::require(cut.factor >= 1 && size % cut.factor == 0, "Cut: factor must divide the ", size,
                " indices of dimension ", cut.dimension, "; got ", cut.factor);
  core::require(num_ranks >= 1, "Cut: num_ranks must be >= 1; got ", num_ranks);
  core::require(rank >= 0 && rank < num_ranks, "Cut: rank must be in [0, ", num_ranks, "); got ",
                rank);
  const std::int64_t block = size / cut.factor;
  const std::int64_t chunk = (block + num_ranks - 1) / num_ranks;
  const Segment own = overlap({rank * chunk, (rank + 1) * chunk}, {0, block});
  Part indices;
  for (std::int64_t first = 0; first < size; first += block)
    indices.append({first + own.begin, first + own.end});
  return indices;
}

// A rank's elements of a leaf: the same ones of each period.
struct Pattern {
  std::int64_t period;  // elements of one index of the dimensions before the cut one
  Part part;

  Part within(const Segment& elements) const {
    Part found;
    for (std::int64_t first = elements.begin / period * period; first < elements.end;
         first += period) {
      for (const Segment& own : part.segments)
        found.append(overlap({first + own.begin, first + own.end}, elements));
    }
    return found;
  }
};

Pattern pattern_of(const Sizes& sizes, const Cut& cut, int num_ranks, int rank) {
  const Part indices = indices_of(sizes, cut, num_ranks, rank);
  const auto dimension = sizes.begin() + cut.dimension;
  const std::int64_t inner = product(dimension + 1, sizes.end());
  Pattern pattern{*dimension * inner, {}};
  for (const Segment& own : indices.segments)
    pattern.part.append({own.begin * inner, own.end * inner});
  return pattern;
}

// Extends the last block if the new one is the same rectangle of the next matrices.
void append(Block block, Slice* slice) {
  const std::int64_t begin = slice->num_elements();
  block.elements = {begin, begin + block.matrices.size() * block.rows.size() * block.cols.size()};
  Block* last = slice->blocks.empty() ? nullptr : &slice->blocks.back();
  if (last != nullptr && last->matrices.end == block.matrices.begin && last->rows == block.rows &&
      last->cols == block.cols) {
    last->matrices.end = block.matrices.end;
    last->elements.end = block.elements.end;
  } else {
    slice->blocks.push_back(std::move(block));
  }
}

// Returns the block at the beginning of contiguous elements of a parameter: whole rows of one
// matrix, or a part of one row.
Block first_block(const Segment& elements, const View& view) {
  const std::int64_t row = elements.begin / view.cols;
  const std::int64_t col = elements.begin % view.cols;
  const std::int64_t matrix = row / view.rows;
  const std::int64_t first = row % view.rows;
  Block block{{matrix, matrix + 1}, {first, first + 1}, {{{0, view.cols}}}, {}};
  if (col == 0 && elements.size() >= view.cols) {
    block.rows.end = std::min(view.rows, first + elements.size() / view.cols);
  } else {
    block.cols = {{{col, std::min(view.cols, col + elements.size())}}};
  }
  return block;
}

// Returns the rank's slice of a parameter that begins at element `begin` of the leaf.
Slice slice_of(const View& view, std::int64_t begin, const Pattern& pattern) {
  const auto own_of = [&](std::int64_t num_elements) {
    Part own = pattern.within({begin, begin + num_elements});
    for (Segment& segment : own.segments) segment = {segment.begin - begin, segment.end - begin};
    return own;
  };
  Slice slice;
  if (view.cols % pattern.period == 0) {  // all rows are cut alike, wherever the first begins
    const Part cols = own_of(view.cols);
    if (cols.size() > 0) append({{0, view.num_matrices}, {0, view.rows}, cols, {}}, &slice);
    return slice;
  }
  for (Segment left : own_of(view.num_elements()).segments) {
    while (left.size() > 0) {
      const Block block = first_block(left, view);
      left.begin += block.rows.size() * block.cols.size();
      append(block, &slice);
    }
  }
  return slice;
}

}  // namespace

std::vector<Slice> slices_of(const Sizes& sizes, const std::vector<View>& views, const Cut& cut,
                             int num_ranks, int rank) {
  const Pattern pattern = pattern_of(sizes, cut, num_ranks, rank);
  std::vector<Slice> slices;
  std::int64_t begin = 0;
  for (const View& view : views) {
    slices.push_back(slice_of(view, begin, pattern));
    begin += view.num_elements();
  }
  const std::int64_t expected = product(sizes.begin(), sizes.end());
  core::invariant(begin == expected, "slices_of: views: expected the ", expected,
                  " elements of the leaf, got ", begin);
  return slices;
}

Sizes local_sizes(Sizes sizes, const Cut& cut, int num_ranks, int rank) {
  const Part indices = indices_of(sizes, cut, num_ranks, rank);
  sizes[static_cast<std::size_t>(cut.dimension)] = indices.size();
  return sizes;
}

}  // namespace dmuon::layout
