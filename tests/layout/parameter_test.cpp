#include "dmuon/layout/parameter.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace dmuon::layout {
namespace {

// Two stacked matrices of three blocks of columns each are six matrices of a third of the columns.
TEST(Parameter, HasTheShapeOfTheMatricesThatAreOrthogonalised) {
  const Parameter parameter{"a", {2, 4, 6, 3, true}, 0};
  EXPECT_EQ(parameter.shape(), (Shape{4, 2, false, 6, 3, true}));
  EXPECT_EQ(parameter.num_elements(), 48);
  EXPECT_EQ(parameter.view.sizes(), (std::vector<std::int64_t>{2, 4, 6}));
  EXPECT_EQ((View{1, 4, 6}.sizes()), (std::vector<std::int64_t>{4, 6}));
}

// Four groups of 24 rows: all 16s together are one matrix, and all 8s another.
TEST(View, HasPartsOfInterleavedRows) {
  const View view{.rows = 96, .cols = 6, .heights = {16, 8}};
  EXPECT_EQ(view.num_groups(), 4);
  EXPECT_EQ(view.row_parts(), (std::vector<RowPart>{{0, 16}, {16, 8}}));
  EXPECT_EQ(view.rows_of({16, 8}), 32);
  EXPECT_EQ((Parameter{"a", view, 0}.shape()), (Shape{96, 6, false, 1, 1, false, {16, 8}}));
  const View plain{2, 4, 6};
  EXPECT_EQ(plain.num_groups(), 1);
  EXPECT_EQ(plain.row_parts(), (std::vector<RowPart>{{0, 4}}));
}

TEST(View, KnowsHeightsThatAreWrong) {
  const auto problem = [](std::vector<std::int64_t> heights, std::int64_t blocks = 1,
                          bool transposed = false) {
    return View{1, 96, 6, blocks, transposed, std::move(heights)}.problem_of_heights();
  };
  EXPECT_EQ(problem({16, 8}), "");
  EXPECT_EQ(problem({96, 8}), "heights >= 1 that add up to at most its 96 rows; got a height of 8");
  EXPECT_EQ(problem({16, 0}), "heights >= 1 that add up to at most its 96 rows; got a height of 0");
  EXPECT_EQ(problem({16}),
            "two heights or more, whose sum divides its 96 rows; got 1 with a sum of 16");
  EXPECT_EQ(problem({16, 9}),
            "two heights or more, whose sum divides its 96 rows; got 2 with a sum of 25");
  EXPECT_NE(problem({16, 8}, 2), "");
  EXPECT_NE(problem({16, 8}, 1, true), "");
}

TEST(Shape, SaysWhatItIs) {
  EXPECT_EQ(to_string({4, 8}), "4 x 8");
  EXPECT_EQ(to_string({4, 2, false, 3, 3}), "4 x 3*2");
  EXPECT_EQ(to_string({96, 6, false, 1, 1, false, {16, 8}}), "4*(16 + 8) x 6");
  EXPECT_EQ(to_string({24, 6, false, 4, 1, false, {16, 8}}), "4 of (16 + 8) x 6");
  EXPECT_EQ(to_string({4, 2, true, 6, 3, true}), "2 of 4 x 3*2 transposed over TP");
}

TEST(Shape, HasCostsThatDoNotDependOnPlacesInMemory) {
  EXPECT_EQ((Shape{4, 2, true, 6, 3, true}.of_costs()), (std::vector{Shape{4, 2, true, 6}}));
}

TEST(Shape, OfInterleavedRowsCostsAsMuchAsItsParts) {
  EXPECT_EQ((Shape{96, 6, false, 2, 1, false, {16, 8}}.of_costs()),
            (std::vector<Shape>{{64, 6, false, 2}, {32, 6, false, 2}}));
}

}  // namespace
}  // namespace dmuon::layout
