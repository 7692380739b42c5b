#include "dmuon/core/index.h"

#include <gtest/gtest.h>

#include <concepts>
#include <sstream>
#include <stdexcept>

namespace dmuon::core {
namespace {

// Two kinds of index do not convert, compare or index each other's vectors.
static_assert(!std::convertible_to<Slot, UnitIndex>);
static_assert(!std::constructible_from<Slot, UnitIndex>);
static_assert(!std::convertible_to<int, Slot>);
static_assert(!std::equality_comparable_with<Slot, UnitIndex>);
template <typename V, typename I>
concept indexed_by = requires(V vector, I index) {
  vector[index];
};
static_assert(indexed_by<Vector<Slot, int>, Slot>);
static_assert(!indexed_by<Vector<Slot, int>, UnitIndex>);
static_assert(!indexed_by<Vector<Slot, int>, int>);

TEST(Index, PrintsAsItsNumberAndOrdersByIt) {
  std::ostringstream out;
  out << Slot(7);
  EXPECT_EQ(out.str(), "7");
  EXPECT_LT(Slot(2), Slot(3));
  EXPECT_EQ(Slot(3), Slot(std::size_t{3}));
}

TEST(Vector, GivesTheValueThatWasPushedUnderTheIndexThatPushReturned) {
  Vector<UnitIndex, int> vector;
  vector.push_back(5);
  const UnitIndex second = vector.push_back(6);
  EXPECT_EQ(second, UnitIndex(1));
  EXPECT_EQ(vector[second], 6);
}

TEST(Vector, VisitsEveryIndexOnceInOrder) {
  const Vector<UnitIndex, int> vector(3, 1);
  int expected = 0;
  for (const UnitIndex index : vector.indices()) EXPECT_EQ(index.value(), expected++);
  EXPECT_EQ(expected, 3);
}

TEST(Vector, RefusesAnIndexPastItsEnd) {
  const Vector<UnitIndex, int> vector(3);
  EXPECT_FALSE(vector.contains(UnitIndex(3)));
  EXPECT_FALSE(vector.contains(UnitIndex(-1)));
  EXPECT_TRUE(vector.contains(UnitIndex(2)));
  EXPECT_THROW(static_cast<void>(vector.at(UnitIndex(3))), std::out_of_range);
  EXPECT_THROW(static_cast<void>(vector.at(UnitIndex(-1))), std::out_of_range);
}

TEST(Vector, HoldsBooleans) {
  Vector<UnitIndex, bool> vector(2, false);
  vector[UnitIndex(1)] = true;
  EXPECT_FALSE(vector[UnitIndex(0)]);
  EXPECT_TRUE(vector[UnitIndex(1)]);
}

}  // namespace
}  // namespace dmuon::core
