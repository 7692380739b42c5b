#include "dmuon/core/error.h"

#include <gtest/gtest.h>

#include <string>

namespace dmuon::core {
namespace {

TEST(Message, StreamsItsPartsInOrder) {
  EXPECT_EQ(message("f: n must be >= ", 1, "; got ", -2.5), "f: n must be >= 1; got -2.5");
}

TEST(Require, ThrowsInvalidArgumentWithTheMessageOnlyIfTheConditionFails) {
  EXPECT_NO_THROW(require(true, "unused"));
  try {
    require(false, "f: n must be >= ", 1, "; got ", 0);
    FAIL() << "did not throw";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "f: n must be >= 1; got 0");
  }
}

TEST(Invariant, ThrowsInternalErrorThatSaysItIsABug) {
  EXPECT_NO_THROW(invariant(true, "unused"));
  try {
    invariant(false, "count is ", 3);
    FAIL() << "did not throw";
  } catch (const InternalError& error) {
    EXPECT_STREQ(error.what(), "dmuon bug: count is 3");
  }
}

}  // namespace
}  // namespace dmuon::core
