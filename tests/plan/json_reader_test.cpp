#include "dmuon/plan/json_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/plan/message_of.h"

namespace dmuon::plan {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

std::string refused(const char* text, const std::function<void(const JsonReader&)>& read) {
  const nlohmann::json value = parse_json(text, "it");
  return message_of([&] { read(JsonReader(value, "it")); });
}

TEST(JsonReader, TakesWholeNumbersOnlyWithinTheirRange) {
  const auto whole = [](const JsonReader& reader) { reader.integer(-kMax - 1, kMax); };
  for (const char* text : {"0", "-0", "-9223372036854775808", "9223372036854775807"}) {
    EXPECT_EQ(refused(text, whole), "") << text;
  }
  for (const char* text : {"1.9", "1.0", "1e0", "true", "null", "\"1\"", "[1]", "{}",
                           "9223372036854775808", "18446744073709551616", "-9223372036854775809"}) {
    EXPECT_NE(refused(text, whole).find("it: expected a whole number in ["), std::string::npos)
        << text;
  }
  const auto small = [](const JsonReader& reader) { reader.small(-2, 3); };
  EXPECT_EQ(refused("3", small), "");
  EXPECT_EQ(refused("-2", small), "");
  EXPECT_EQ(refused("4", small), "it: expected a whole number in [-2, 3]; got 4");
  EXPECT_NE(refused("-3", small), "");
  EXPECT_NE(refused("4294967298", small), "");  // 2 in 32 bits
}

TEST(JsonReader, TakesEachTypeForItselfOnly) {
  const auto number = [](const JsonReader& reader) { reader.number(); };
  const auto string = [](const JsonReader& reader) { (void)reader.string(); };
  const auto boolean = [](const JsonReader& reader) { (void)reader.boolean(); };
  EXPECT_EQ(refused("1.5", number), "");
  EXPECT_EQ(refused("1", number), "");
  EXPECT_EQ(refused("true", number), "it: expected a finite number; got true");
  const auto bounded = [](const JsonReader& reader) { reader.number(0.5, 2); };
  EXPECT_EQ(refused("0.5", bounded), "");
  EXPECT_EQ(refused("2", bounded), "");
  EXPECT_EQ(refused("2.5", bounded), "it: expected a number in [0.5, 2]; got 2.5");
  EXPECT_EQ(refused("0", bounded), "it: expected a number in [0.5, 2]; got 0");
  EXPECT_EQ(refused("true", bounded), "it: expected a number in [0.5, 2]; got true");
  EXPECT_EQ(refused("\"a\"", string), "");
  EXPECT_EQ(refused("null", string), "it: expected a string; got null");
  EXPECT_EQ(refused("false", boolean), "");
  EXPECT_EQ(refused("0", boolean), "it: expected true or false; got 0");
}

TEST(JsonReader, NamesThePlaceOfAMember) {
  const nlohmann::json value = parse_json(R"({"a": [{"b": 1}, {"b": "x"}], "none": null})", "it");
  const JsonReader reader(value, "it");
  EXPECT_EQ(reader.at("a").items()[0].at("b").integer(0, 9), 1);
  EXPECT_EQ(message_of([&] { reader.at("a").items()[1].at("b").integer(0, 9); }),
            "it.a[1].b: expected a whole number in [0, 9]; got \"x\"");
  EXPECT_EQ(message_of([&] { reader.at("c"); }), "it: expected a member 'c'; got none");
  EXPECT_EQ(message_of([&] { reader.at("a").at("c"); }),
            "it.a: expected an object; got an array of 2");
  EXPECT_EQ(message_of([&] { reader.items(); }), "it: expected an array; got an object of 2");
  EXPECT_FALSE(reader.find("c"));
  EXPECT_FALSE(reader.find("none"));
  EXPECT_TRUE(reader.find("a"));
}

TEST(JsonReader, HasWhatIsNotSaid) {
  const nlohmann::json value = parse_json(R"({"a": 3, "b": true, "none": null})", "it");
  const JsonReader reader(value, "it");
  EXPECT_EQ(reader.count("a", 1, 9), 3);
  EXPECT_EQ(reader.count("none", 1, 9), 1);
  EXPECT_EQ(reader.count("c", 0, 9), 0);
  EXPECT_EQ(message_of([&] { (void)reader.count("a", 4, 9); }),
            "it.a: expected a whole number in [4, 9]; got 3");
  EXPECT_TRUE(reader.flag("b"));
  EXPECT_FALSE(reader.flag("none"));
  EXPECT_FALSE(reader.flag("c"));
  EXPECT_EQ(message_of([&] { (void)reader.flag("a"); }), "it.a: expected true or false; got 3");
}

// Python decodes messages as UTF-8, and commands print them in one line.
TEST(JsonReader, ComplainsInShortLinesOfAscii) {
  std::string text = "\"";
  for (int i = 0; i < 100; ++i) text += "\u00e9\\n";
  const std::string messages[] = {
      refused((text + "\"").c_str(), [](const JsonReader& reader) { reader.number(); }),
      message_of([&] { parse_json(text + "\xff\"", "it"); }),
      message_of([&] { parse_json(text, "it"); }),
      message_of([&] { parse_json("{\n\n\n\"a\" \"" + std::string(100'000, 'x'), "it"); }),
  };
  for (const std::string& message : messages) {
    EXPECT_EQ(message.rfind("it: expected ", 0), 0U) << message;
    EXPECT_LT(message.size(), 400U);
    EXPECT_TRUE(std::all_of(message.begin(), message.end(), [](char byte) {
      return byte >= ' ' && byte <= '~';
    })) << message;
  }
}

TEST(RequireVersion, AcceptsNoOther) {
  const auto two = [](const JsonReader& reader) { reader.require_version(2); };
  EXPECT_EQ(refused(R"({"schema_version": 2})", two), "");
  EXPECT_EQ(refused(R"({"schema_version": 3})", two), "it.schema_version: expected 2; got 3");
  EXPECT_NE(refused(R"({"schema_version": 2.0})", two), "");
  EXPECT_NE(refused("{}", two), "");
}

}  // namespace
}  // namespace dmuon::plan
