#include "dmuon/layout/slices.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "dmuon/core/error.h"

namespace dmuon::layout {
namespace {

using Sizes = std::vector<std::int64_t>;
using Elements = std::vector<std::int64_t>;

struct Case {
  std::string name;
  Sizes sizes;
  Cut cut;
  int num_ranks;
  std::vector<View> views;
};

// The product of sizes from a dimension on.
std::int64_t product(const Sizes& sizes, std::int64_t first = 0) {
  return std::accumulate(sizes.begin() + first, sizes.end(), std::int64_t{1}, std::multiplies<>());
}

std::vector<Slice> slices_on(const Case& one, int rank) {
  return slices_of(one.sizes, one.views, one.cut, one.num_ranks, rank);
}

// What the slices are compared with: torch.chunk of each block, index by index.
std::vector<Sizes> indices_by_rank(std::int64_t size, int factor, int num_ranks) {
  std::vector<Sizes> indices(static_cast<std::size_t>(num_ranks));
  for (std::int64_t block = 0; block < factor; ++block) {
    std::size_t rank = 0;
    std::int64_t in_chunk = 0;
    for (std::int64_t i = block * size / factor; i < (block + 1) * size / factor; ++i) {
      if (in_chunk * num_ranks * factor >= size) {  // as many as ceil(size / factor / num_ranks)
        ++rank;
        in_chunk = 0;
      }
      ++in_chunk;
      indices[rank].push_back(i);
    }
  }
  return indices;
}

// The rank's local tensor of a leaf whose elements are 0, 1, 2, ...
Elements local_tensor(const Case& one, int rank) {
  const auto cut = static_cast<std::size_t>(one.cut.dimension);
  const Sizes own = indices_by_rank(one.sizes[cut], one.cut.factor,
                                    one.num_ranks)[static_cast<std::size_t>(rank)];
  Elements elements{0};
  for (std::size_t d = 0; d < one.sizes.size(); ++d) {
    Sizes indices = own;
    if (d != cut) {
      indices.resize(static_cast<std::size_t>(one.sizes[d]));
      std::iota(indices.begin(), indices.end(), 0);
    }
    Elements longer;
    for (const std::int64_t element : elements) {
      for (const std::int64_t index : indices) longer.push_back(element * one.sizes[d] + index);
    }
    elements = longer;
  }
  return elements;
}

// Copies a slice, from local[begin] on, to whole matrices. Returns the end of the slice.
std::size_t gather(const Slice& slice, const View& view, const Elements& local, std::size_t begin,
                   Elements* whole) {
  std::int64_t end = 0;
  for (const Block& block : slice.blocks) {
    EXPECT_EQ(block.elements.begin, end);
    end = block.elements.end;
    EXPECT_GT(block.elements.size(), 0);
    EXPECT_LE(block.matrices.end, view.num_matrices);
    EXPECT_LE(block.rows.end, view.rows);
    EXPECT_LE(block.cols.segments.back().end, view.cols);
    auto next = begin + static_cast<std::size_t>(block.elements.begin);
    for (std::int64_t m = block.matrices.begin; m < block.matrices.end; ++m) {
      for (std::int64_t r = block.rows.begin; r < block.rows.end; ++r) {
        for (const Segment& cols : block.cols.segments) {
          for (std::int64_t c = cols.begin; c < cols.end; ++c) {
            const auto at = static_cast<std::size_t>((m * view.rows + r) * view.cols + c);
            EXPECT_EQ(whole->at(at), -1) << "from a second rank";
            whole->at(at) = local.at(next++);
          }
        }
      }
    }
    EXPECT_EQ(next, begin + static_cast<std::size_t>(end));
  }
  EXPECT_EQ(slice.num_elements(), end);
  return begin + static_cast<std::size_t>(end);
}

// The slices of all ranks together are the whole matrices, and a rank's slices its local tensor.
void expect_wholes(const Case& one) {
  std::vector<Elements> wholes;
  for (const View& view : one.views)
    wholes.emplace_back(static_cast<std::size_t>(view.num_elements()), -1);
  for (int rank = 0; rank < one.num_ranks; ++rank) {
    const Elements local = local_tensor(one, rank);
    const std::vector<Slice> slices = slices_on(one, rank);
    ASSERT_EQ(slices.size(), one.views.size());
    std::size_t at = 0;
    for (std::size_t i = 0; i < slices.size(); ++i)
      at = gather(slices[i], one.views[i], local, at, &wholes[i]);
    EXPECT_EQ(at, local.size());
    const Sizes sizes = local_sizes(one.sizes, one.cut, one.num_ranks, rank);
    EXPECT_EQ(product(sizes), static_cast<std::int64_t>(local.size()));
  }
  std::int64_t expected = 0;
  for (const Elements& whole : wholes) {
    for (const std::int64_t element : whole) ASSERT_EQ(element, expected++);
  }
}

// Views may have rows of several lengths, as long as each is a product of the leaf's last sizes.
Case random_case(std::mt19937* random) {
  const auto draw = [&](std::int64_t first, std::int64_t last) {
    return std::uniform_int_distribution<std::int64_t>(first, last)(*random);
  };
  Case one;
  for (std::int64_t d = draw(2, 4); d > 0; --d) one.sizes.push_back(draw(1, 9));
  const auto num_dimensions = static_cast<std::int64_t>(one.sizes.size());
  one.num_ranks = static_cast<int>(draw(1, 8));
  one.cut.dimension = static_cast<int>(draw(0, num_dimensions - 1));
  do {
    one.cut.factor = static_cast<int>(draw(1, 3));
  } while (one.sizes[static_cast<std::size_t>(one.cut.dimension)] % one.cut.factor != 0);
  const bool has_one_length = draw(0, 2) > 0;
  std::int64_t cols = 0;
  for (std::int64_t left = product(one.sizes); left > 0;) {
    if (cols == 0 || !has_one_length) cols = product(one.sizes, draw(1, num_dimensions - 1));
    if (cols > left) cols = one.sizes.back();
    const std::int64_t rows = draw(1, left / cols);
    const std::int64_t num_matrices = draw(1, left / cols / rows);
    one.views.push_back({num_matrices, rows, cols});
    left -= num_matrices * rows * cols;
  }
  return one;
}

TEST(Slices, OfAllRanksAreTheWholesInRandomCases) {
  std::mt19937 random(0);
  for (int i = 0; i < 5000; ++i) {
    const Case one = random_case(&random);
    expect_wholes(one);
    if (::testing::Test::HasFailure()) {
      FAIL() << "case " << i << ": sizes " << ::testing::PrintToString(one.sizes) << ", cut "
             << one.cut.dimension << " factor " << one.cut.factor << ", " << one.num_ranks
             << " ranks";
    }
  }
}

Block block(Segment matrices, Segment rows, std::vector<Segment> cols, Segment elements) {
  return {matrices, rows, {std::move(cols)}, elements};
}

struct Named : Case {
  int rank;
  std::vector<Slice> expected;  // of this rank, by hand
};

// 8 heads of 4 rows (2 heads of keys and of values), 12 columns, 20 or 18 hidden features.
std::vector<Named> named_cases() {
  const std::vector<Segment> all{{0, 12}};
  return {
      {{"queries by head", {32, 12}, {0}, 4, {{8, 4, 12}}},
       1,
       {{{block({2, 4}, {0, 4}, all, {0, 96})}}}},
      {{"heads that 3 ranks do not divide", {32, 12}, {0}, 3, {{8, 4, 12}}},
       1,
       {{{block({2, 3}, {3, 4}, all, {0, 12}), block({3, 5}, {0, 4}, all, {12, 108}),
          block({5, 6}, {0, 2}, all, {108, 132})}}}},
      {{"fused qkv", {48, 12}, {0}, 4, {{1, 32, 12}, {2, 8, 12}}},
       2,
       {{{block({0, 1}, {24, 32}, all, {0, 96})}}, {{block({0, 1}, {0, 4}, all, {0, 48})}}}},
      {{"fused qkv, a rank without queries", {48, 12}, {0}, 4, {{1, 32, 12}, {2, 8, 12}}},
       3,
       {{}, {{block({0, 1}, {4, 8}, all, {0, 48}), block({1, 2}, {0, 8}, all, {48, 144})}}}},
      {{"gate and up, strided", {40, 12}, {0, 2}, 4, {{2, 20, 12}}},
       1,
       {{{block({0, 2}, {5, 10}, all, {0, 120})}}}},
      {{"gate and up as one matrix, strided", {40, 12}, {0, 2}, 4, {{1, 40, 12}}},
       1,
       {{{block({0, 1}, {5, 10}, all, {0, 60}), block({0, 1}, {25, 30}, all, {60, 120})}}}},
      {{"gate and up, contiguous", {40, 12}, {0}, 4, {{2, 20, 12}}},
       1,
       {{{block({0, 1}, {10, 20}, all, {0, 120})}}}},
      {{"rowwise down", {12, 20}, {1}, 4, {{1, 12, 20}}},
       3,
       {{{block({0, 1}, {0, 12}, {{15, 20}}, {0, 60})}}}},
      {{"rowwise down, uneven", {12, 18}, {1}, 4, {{1, 12, 18}}},
       3,
       {{{block({0, 1}, {0, 12}, {{15, 18}}, {0, 36})}}}},
      {{"rowwise down, strided", {12, 20}, {1, 2}, 3, {{1, 12, 20}}},
       2,
       {{{block({0, 1}, {0, 12}, {{8, 10}, {18, 20}}, {0, 48})}}}},
      {{"Conv1D [in, out], colwise", {12, 20}, {1}, 4, {{1, 12, 20, 1, true}}},
       0,
       {{{block({0, 1}, {0, 12}, {{0, 5}}, {0, 60})}}}},
      {{"convolution by channels", {5, 4, 3, 2}, {1}, 2, {{1, 5, 24}}},
       1,
       {{{block({0, 1}, {0, 5}, {{12, 24}}, {0, 60})}}}},
      {{"convolution by its kernel", {5, 2, 3, 2}, {2}, 2, {{1, 5, 12}}},
       0,
       {{{block({0, 1}, {0, 5}, {{0, 4}, {6, 10}}, {0, 40})}}}},
      {{"experts by expert", {4, 20, 12}, {0}, 2, {{4, 20, 12}}},
       1,
       {{{block({2, 4}, {0, 20}, all, {0, 480})}}}},
      {{"experts by rows", {4, 20, 12}, {1}, 4, {{4, 20, 12}}},
       2,
       {{{block({0, 4}, {10, 15}, all, {0, 240})}}}},
      {{"experts by columns", {4, 12, 20}, {2}, 4, {{4, 12, 20}}},
       2,
       {{{block({0, 4}, {0, 12}, {{10, 15}}, {0, 240})}}}},
      {{"experts' gate and up, strided", {4, 40, 12}, {1, 2}, 4, {{8, 20, 12}}},
       0,
       {{{block({0, 8}, {0, 5}, all, {0, 480})}}}},
      {{"two blocks of columns", {12, 40}, {1}, 4, {{1, 12, 40, 2}}},
       1,
       {{{block({0, 1}, {0, 12}, {{10, 20}}, {0, 120})}}}},
      {{"blocks as long as a chunk", {6, 12}, {0, 2}, 3, {{1, 6, 12}}},
       0,
       {{{block({0, 1}, {0, 1}, all, {0, 12}), block({0, 1}, {3, 4}, all, {12, 24})}}}},
      {{"one rank", {4, 40, 12}, {1, 2}, 1, {{8, 20, 12}}},
       0,
       {{{block({0, 8}, {0, 20}, all, {0, 1920})}}}},
      {{"a rank without rows", {5, 12}, {0}, 4, {{1, 5, 12}}}, 3, {{}}},
  };
}

TEST(Slices, AreTheNamedOnes) {
  for (const Named& one : named_cases()) {
    SCOPED_TRACE(one.name);
    EXPECT_EQ(slices_on(one, one.rank), one.expected);
    expect_wholes(one);
  }
}

// By hand: the second view's rows begin in the middle of the leaf's.
TEST(Slices, HavePartsOfRowsIfViewsBeginInsideARow) {
  Case one{"", {3, 2, 3}, {1}, 2, {{1, 1, 3}, {1, 2, 6}, {1, 1, 3}}};
  EXPECT_EQ(slices_on(one, 0), (std::vector<Slice>{{{block({0, 1}, {0, 1}, {{0, 3}}, {0, 3})}},
                                                   {{block({0, 1}, {0, 2}, {{3, 6}}, {0, 6})}},
                                                   {}}));
  expect_wholes(one);
  one.cut.dimension = 0;
  one.num_ranks = 3;
  EXPECT_EQ(slices_on(one, 1), (std::vector<Slice>{{},
                                                   {{block({0, 1}, {0, 1}, {{3, 6}}, {0, 3}),
                                                     block({0, 1}, {1, 2}, {{0, 3}}, {3, 6})}},
                                                   {}}));
  expect_wholes(one);
}

TEST(LocalSizes, AreThoseOfChunks) {
  EXPECT_EQ(local_sizes({5, 12}, {0}, 4, 0), (Sizes{2, 12}));
  EXPECT_EQ(local_sizes({5, 12}, {0}, 4, 2), (Sizes{1, 12}));
  EXPECT_EQ(local_sizes({5, 12}, {0}, 4, 3), (Sizes{0, 12}));
  EXPECT_EQ(local_sizes({4, 10, 12}, {1, 2}, 2, 0), (Sizes{4, 6, 12}));
  EXPECT_EQ(local_sizes({4, 10, 12}, {1, 2}, 2, 1), (Sizes{4, 4, 12}));
}

TEST(Slices, RefuseACutThatDoesNotFit) {
  const auto refuses = [](const Sizes& sizes, Cut cut, int num_ranks, int rank,
                          const std::string& words) {
    const std::vector<View> views{{1, 6, 4}};
    for (const bool of_sizes : {false, true}) {
      try {
        if (of_sizes) local_sizes(sizes, cut, num_ranks, rank);
        if (!of_sizes) slices_of(sizes, views, cut, num_ranks, rank);
        ADD_FAILURE() << "accepted: " << words;
      } catch (const core::InvalidArgument& error) {
        EXPECT_EQ(error.what(), "Cut: " + words);
      }
    }
  };
  refuses({6, 4}, {2}, 2, 0, "dimension must be in [0, 2); got 2");
  refuses({6, 4}, {-1}, 2, 0, "dimension must be in [0, 2); got -1");
  refuses({0, 4}, {0}, 2, 0, "sizes of the leaf must be >= 1; got 0");
  refuses({6, 4}, {1, 3}, 2, 0, "factor must divide the 4 indices of dimension 1; got 3");
  refuses({6, 4}, {1, 0}, 2, 0, "factor must divide the 4 indices of dimension 1; got 0");
  refuses({6, 4}, {0}, 0, 0, "num_ranks must be >= 1; got 0");
  refuses({6, 4}, {0}, 2, 2, "rank must be in [0, 2); got 2");
  refuses({6, 4}, {0}, 2, -1, "rank must be in [0, 2); got -1");
  EXPECT_THROW(slices_of({6, 4}, {{1, 5, 4}}, {0}, 2, 0), core::InternalError);
}

}  // namespace
}  // namespace dmuon::layout
