#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "dmuon/catalog/catalog.h"
#include "tests/plan/message_of.h"

namespace dmuon::catalog {
namespace {

struct Expected {
  std::int64_t num_matrices;
  std::int64_t num_elements;
  bool stand_in;
};

// Matrices as models/README.md's table has them. Elements to the last one, as they are in the table
// when rounded: whoever changes a file changes these.
const std::map<std::string, Expected> kExpected = {
    {"deepseek-v3", {45'090, 669'172'039'680, false}},
    {"kimi-k2", {69'668, 1'024'058'392'576, false}},
    {"llama-3-70b", {560, 68'451'041'280, false}},
    {"pi0", {252, 2'704'306'176, false}},
    {"qwen2.5-7b", {196, 6'525'288'448, false}},
    {"qwen2.5-vl-3b", {414, 3'441'197'056, false}},
    {"wall-oss-0.5", {417, 3'793'747'968, false}},
    {"wall-wm", {605, 5'809'897'472, true}},
};

// In 10^9, of models/README.md's table.
const std::map<std::string, double> kBillions = {
    {"deepseek-v3", 669}, {"kimi-k2", 1024},       {"llama-3-70b", 68.5},  {"pi0", 2.70},
    {"qwen2.5-7b", 6.53}, {"qwen2.5-vl-3b", 3.44}, {"wall-oss-0.5", 3.79}, {"wall-wm", 5.81},
};

TEST(Models, AreThoseOfTheirTable) {
  const std::vector<std::string> names = model_names();
  ASSERT_EQ(names.size(), kExpected.size());
  auto known = kExpected.begin();
  for (const std::string& name : names) {
    EXPECT_EQ(name, known->first);  // alphabetical
    const Expected& expected = (known++)->second;
    const Model found = model(name);
    EXPECT_EQ(found.name, name);
    EXPECT_EQ(found.stand_in, expected.stand_in) << name;
    EXPECT_GT(found.description.size(), 20U);
    EXPECT_GT(found.source.size(), 20U);
    std::int64_t elements = 0;
    std::int64_t matrices = 0;
    for (const plan::Parameter& parameter : found.inventory) {
      elements += parameter.num_elements();
      matrices += parameter.view.num_matrices;
    }
    EXPECT_EQ(matrices, expected.num_matrices) << name;
    const double billions = kBillions.at(name);
    const double half_a_digit = billions < 10 ? 0.005 : billions < 100 ? 0.05 : 0.5;
    EXPECT_NEAR(static_cast<double>(elements) / 1e9, billions, half_a_digit) << name;
    EXPECT_EQ(elements, expected.num_elements) << name;
  }
}

TEST(Models, HaveUnitsThatFollowEachOther) {
  for (const std::string& name : model_names()) {
    int unit = 0;
    for (const plan::Parameter& matrix : model(name).inventory) {
      ASSERT_TRUE(matrix.unit == unit || matrix.unit == unit + 1) << name << ": " << matrix.name;
      unit = matrix.unit;
    }
  }
}

// The published config: 28 layers of 3584, four of whose 28 heads share keys, and 18944.
TEST(Models, OfQwenAreItsLayers) {
  const plan::Inventory inventory = model("qwen2.5-7b").inventory;
  std::multiset<std::pair<std::int64_t, std::int64_t>> layer;
  for (const plan::Parameter& matrix : inventory) {
    if (matrix.unit == 27) layer.insert({matrix.view.rows, matrix.view.cols});
  }
  EXPECT_EQ(layer, (std::multiset<std::pair<std::int64_t, std::int64_t>>{{3584, 3584},
                                                                         {3584, 3584},
                                                                         {512, 3584},
                                                                         {512, 3584},
                                                                         {18944, 3584},
                                                                         {18944, 3584},
                                                                         {3584, 18944}}));
}

TEST(Models, AreNamedWhenAskedForAnother) {
  const std::string message = plan::message_of([] { model("gpt-2"); });
  EXPECT_NE(message.find("'gpt-2'"), std::string::npos) << message;
  for (const auto& [name, expected] : kExpected) {
    EXPECT_NE(message.find(name), std::string::npos) << message;
  }
  EXPECT_NE(plan::message_of([] { model("devices"); }), "");
  EXPECT_NE(plan::message_of([] { model(""); }), "");
}

}  // namespace
}  // namespace dmuon::catalog
