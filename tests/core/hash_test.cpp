#include "dmuon/core/hash.h"

#include <gtest/gtest.h>

#include <string_view>

namespace dmuon::core {
namespace {

// Expected values: FNV-1a over little-endian 64-bit integers, strings led by their length, by an
// independent program.
TEST(Hasher, IsFnv1aOfTheBytesOnEveryMachine) {
  EXPECT_EQ(Hasher().value(), 0xcbf29ce484222325ULL);
  EXPECT_EQ(Hasher().add(1).value(), 0x89cd31291d2aefa4ULL);
  EXPECT_EQ(Hasher().add(-1).value(), 0x8cf51a8bfca3883dULL);
  EXPECT_EQ(Hasher().add("matrix").value(), 0x18ae2613ccda5c6ULL);
  EXPECT_EQ(Hasher().add("a\xff").add(std::int64_t{1} << 40).value(), 0x9b5077853769e12cULL);
}

TEST(Hasher, TellsWhereOneStringEndsAndTheNextBegins) {
  EXPECT_NE(Hasher().add("ab").add("c").value(), Hasher().add("a").add("bc").value());
  EXPECT_NE(Hasher().add("").add("a").value(), Hasher().add("a").add("").value());
}

TEST(Hasher, DependsOnOrder) {
  EXPECT_NE(Hasher().add(1).add(2).value(), Hasher().add(2).add(1).value());
}

}  // namespace
}  // namespace dmuon::core
