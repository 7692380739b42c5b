#include "dmuon/layout/parameter.h"

#include <gtest/gtest.h>

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

TEST(Shape, SaysWhatItIs) {
  EXPECT_EQ(to_string({4, 8}), "4 x 8");
  EXPECT_EQ(to_string({4, 2, false, 3, 3}), "4 x 3*2");
  EXPECT_EQ(to_string({4, 2, true, 6, 3, true}), "2 of 4 x 3*2 transposed over TP");
}

TEST(Shape, HasCostsThatDoNotDependOnPlacesInMemory) {
  EXPECT_EQ((Shape{4, 2, true, 6, 3, true}.of_costs()), (Shape{4, 2, true, 6}));
}

}  // namespace
}  // namespace dmuon::layout
