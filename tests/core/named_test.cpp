#include "dmuon/core/named.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace dmuon::core {
namespace {

struct Fruit {
  std::string name;
  int weight;
};

const std::vector<Fruit> kFruits = {{"apple", 3}, {"pear", 4}, {"pear", 5}};

TEST(Named, IsTheFirstOfThisName) {
  EXPECT_EQ(&named(kFruits, "pear", "eat: expected", &Fruit::name), &kFruits[1]);
}

TEST(Named, TakesNamesThemselves) {
  const std::vector<std::string> names = {"apple", "pear"};
  EXPECT_EQ(&named(names, "pear", "eat: expected"), &names[1]);
}

TEST(Named, RefusesWithAllNames) {
  try {
    named(kFruits, "nut", "eat: expected", &Fruit::name, " on day ", 3);
    FAIL() << "did not throw";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "eat: expected one of apple, pear, pear on day 3; got 'nut'");
  }
}

}  // namespace
}  // namespace dmuon::core
