#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "dmuon/catalog/catalog.h"
#include "tests/plan/message_of.h"

namespace dmuon::catalog {
namespace {

std::string with_units(const std::string& units) {
  return R"({"schema_version": 1, "name": "n", "description": "d", "source": "s", "stand_in": true,
      "units": )" +
         units + "}";
}

TEST(ModelFromJson, ExpandsRepeatedUnitsAndStacks) {
  const Model found = model_from_json(with_units(R"([
      {"name": "layers.{}.mlp", "repeat": 2, "first": 3, "matrices": [
        {"name": "up", "rows": 8, "cols": 4},
        {"name": "experts", "rows": 2, "cols": 3, "num_matrices": 2},
        {"name": "old", "rows": 3, "cols": 3, "stack": 4}]},
      {"name": "nothing", "matrices": []},
      {"name": "last", "matrices": [{"name": "w", "rows": 5, "cols": 6, "num_matrices": 1}]}])"));
  EXPECT_EQ(found.name, "n");
  EXPECT_EQ(found.description, "d");
  EXPECT_EQ(found.source, "s");
  EXPECT_TRUE(found.stand_in);
  EXPECT_EQ(found.inventory, (plan::Inventory{{"layers.3.mlp.up", {1, 8, 4}, 0},
                                              {"layers.3.mlp.experts", {2, 2, 3}, 0},
                                              {"layers.3.mlp.old", {4, 3, 3}, 0},
                                              {"layers.4.mlp.up", {1, 8, 4}, 1},
                                              {"layers.4.mlp.experts", {2, 2, 3}, 1},
                                              {"layers.4.mlp.old", {4, 3, 3}, 1},
                                              {"last.w", {1, 5, 6}, 3}}));
}

TEST(ModelFromJson, ReadsHowMatricesLieInTheirParameter) {
  const Model found = model_from_json(with_units(R"([{"name": "h", "matrices": [
        {"name": "c_attn", "rows": 4, "cols": 12, "column_blocks": 3, "transposed": true},
        {"name": "k", "rows": 2, "cols": 12, "transposed": false, "continues": true}]}])"));
  EXPECT_EQ(found.inventory, (plan::Inventory{{"h.c_attn", {1, 4, 12, 3, true}, 0},
                                              {"h.k", {1, 2, 12}, 0, false, true}}));
}

TEST(ModelFromJson, CutsWhatIsNotWhole) {
  const std::string text = with_units(R"([{"name": "h", "matrices": [
        {"name": "up", "rows": 8, "cols": 4},
        {"name": "gate", "rows": 4, "cols": 4, "whole": true}]}])");
  EXPECT_EQ(model_from_json(text, true).inventory,
            (plan::Inventory{{"h.up", {1, 8, 4}, 0, true}, {"h.gate", {1, 4, 4}, 0}}));
  EXPECT_EQ(model_from_json(text).inventory,
            (plan::Inventory{{"h.up", {1, 8, 4}, 0}, {"h.gate", {1, 4, 4}, 0}}));
}

TEST(ModelFromJson, TakesUnitsApartThatLieBetweenOthers) {
  const Model found = model_from_json(with_units(R"([
      {"name": "", "unit": 1, "matrices": [{"name": "first", "rows": 8, "cols": 4}]},
      {"name": "block", "unit": 0, "matrices": [{"name": "w", "rows": 2, "cols": 3}]},
      {"name": "", "unit": 1, "matrices": [{"name": "a.last", "rows": 5, "cols": 6}]}])"));
  EXPECT_EQ(found.inventory,
            (plan::Inventory{
                {"first", {1, 8, 4}, 1}, {"block.w", {1, 2, 3}, 0}, {"a.last", {1, 5, 6}, 1}}));
  EXPECT_EQ(
      plan::message_of([] {
        model_from_json(with_units(R"([{"name": "u", "unit": 1, "repeat": 2, "matrices": []}])"));
      }),
      "model.units: expected no repeat where unit is given; got 2");
}

// An entry without a number makes a unit of its own, whatever numbers others have.
TEST(ModelFromJson, CountsUnitsOnFromTheLargestNumber) {
  const auto units_of = [](const std::vector<std::string>& members) {
    std::string units;
    for (std::size_t i = 0; i < members.size(); ++i) {
      units += std::string(i > 0 ? "," : "") + "{\"name\": \"u" + std::to_string(i) + "\", " +
               members[i] + R"("matrices": [{"name": "w", "rows": 2, "cols": 3}]})";
    }
    std::vector<int> found;
    for (const plan::Parameter& parameter :
         model_from_json(with_units("[" + units + "]")).inventory)
      found.push_back(parameter.unit);
    return found;
  };
  const std::string zero = R"("unit": 0, )";
  EXPECT_EQ(units_of({R"("unit": 5, )", "", zero, ""}), (std::vector{5, 6, 0, 7}));
  EXPECT_EQ(units_of({"", "", zero, ""}), (std::vector{0, 1, 0, 2}));
  EXPECT_EQ(plan::message_of([&] {
              units_of({R"("unit": 4194304, )", zero, ""});
            }),
            "model.units: expected at most 4194304 units; got 4194306");
}

TEST(ModelFromJson, NamesThePlaceOfWhatIsWrong) {
  const auto of = [](const std::string& units) {
    return plan::message_of([&] { model_from_json(with_units(units)); });
  };
  EXPECT_EQ(of("[]"), "");
  EXPECT_EQ(of("{}"), "model.units: expected an array; got an object of 0");
  EXPECT_EQ(of("[{\"matrices\": []}]"), "model.units[0]: expected a member 'name'; got none");
  EXPECT_EQ(of("[{\"name\": \"u\"}]"), "model.units[0]: expected a member 'matrices'; got none");
  EXPECT_NE(
      of("[{\"name\": \"u\", \"repeat\": 0, \"matrices\": []}]").find("model.units[0].repeat"),
      std::string::npos);
  EXPECT_NE(of("[{\"name\": \"u\", \"first\": -1, \"matrices\": []}]").find("model.units[0].first"),
            std::string::npos);
  EXPECT_NE(of(R"([{"name": "u", "matrices": [{"name": "m", "rows": 2147483648, "cols": 1}]}])")
                .find("model.units[0].matrices[0].rows"),
            std::string::npos);
  EXPECT_NE(of(R"([{"name": "u", "repeat": 2, "matrices": [{"name": "m", "rows": 2, "cols": 1}]}])")
                .find("'u.m' must occur once"),
            std::string::npos);
}

// Short texts that ask for much are answered at once.
TEST(ModelFromJson, MakesNoMoreThanTheMostMatricesAndUnits) {
  const auto of = [](const std::string& repeat, const std::string& stack) {
    return plan::message_of([&] {
      model_from_json(
          with_units(R"([{"name": "a", "matrices": [{"name": "m", "rows": 1, "cols": 1}]},
        {"name": "{}", "repeat": )" +
                     repeat + R"(, "matrices": [{"name": "m", "rows": 1, "cols": 1,
         "num_matrices": )" +
                     stack + "}]}]"));
    });
  };
  const std::string expected = "model.units: expected at most 4194304 matrices; got 4194305";
  EXPECT_EQ(of("10", "10"), "");
  EXPECT_EQ(of("4194304", "1"), expected);
  EXPECT_EQ(of("1", "4194304"), "");
  EXPECT_EQ(of("4194304", "4194304"), expected);
  EXPECT_EQ(plan::message_of([] {
              model_from_json(with_units(R"([{"name": "a", "matrices": []},
                {"name": "b", "repeat": 4194304, "matrices": []}])"));
            }),
            "model.units: expected at most 4194304 units; got 4194305");
}

}  // namespace
}  // namespace dmuon::catalog
