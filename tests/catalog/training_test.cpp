#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <string>

#include "dmuon/catalog/catalog.h"
#include "tests/plan/message_of.h"

namespace dmuon::catalog {
namespace {

using core::UnitIndex;
using PerUnit = core::Vector<UnitIndex, double>;

std::string with_members(const std::string& members, const std::string& training = "null") {
  return R"({"schema_version": 1, "name": "n", "description": "d", "source": "s", "stand_in": true,
      "training": )" +
         training + R"(, "units": [{"name": "u{}", )" + members + "}]}";
}

std::int64_t num_elements(const Model& model) {
  std::int64_t sum = 0;
  for (const plan::Parameter& parameter : model.inventory) sum += parameter.num_elements();
  return sum;
}

double sum(const PerUnit& units) { return std::accumulate(units.begin(), units.end(), 0.); }

TEST(Training, OfAFileWithoutItIsTwoFlopsAnElement) {
  const Training found = model_from_json(with_members(R"("repeat": 2, "matrices": [
        {"name": "w", "rows": 8, "cols": 4},
        {"name": "experts", "rows": 2, "cols": 3, "num_matrices": 2},
        {"name": "old", "rows": 3, "cols": 3, "stack": 4}])"))
                             .training;
  EXPECT_EQ(found.sequence, 0);
  EXPECT_EQ(found.outside_elements, 0);
  EXPECT_EQ(found.outside_flops, 0);
  EXPECT_EQ(found.unit_flops, (PerUnit{2 * (32 + 12 + 36), 2 * (32 + 12 + 36)}));
  EXPECT_EQ(found.attention_flops, (PerUnit{0, 0}));
}

TEST(Training, CountsTokensActiveMatricesAndAttention) {
  const std::string all = R"({"sequence": 9, "outside_elements": 7, "outside_flops": 1.5,
      "source": "s"})";
  const auto of = [&](const std::string& members) {
    return model_from_json(with_members(members, all)).training;
  };
  const Training causal = of(R"("tokens": 0.5, "attention_width": 6, "matrices": [
        {"name": "w", "rows": 8, "cols": 4},
        {"name": "experts", "rows": 2, "cols": 3, "num_matrices": 5, "active": 2},
        {"name": "lookup", "rows": 9, "cols": 9, "active": 0}])");
  EXPECT_EQ(causal.sequence, 9);
  EXPECT_EQ(causal.outside_elements, 7);
  EXPECT_EQ(causal.outside_flops, 1.5);
  EXPECT_EQ(causal.unit_flops, PerUnit{0.5 * 2 * (32 + 2 * 6)});
  EXPECT_EQ(causal.attention_flops, PerUnit{0.5 * 2 * 6});
  const std::string width = R"("attention_width": 6, "matrices": [], "causal": )";
  EXPECT_EQ(of(width + "false").attention_flops, PerUnit{4 * 6});
  EXPECT_EQ(of(width + "true").attention_flops, PerUnit{2 * 6});
}

// Fewer tokens than a sequence are one by themselves.
TEST(Training, CountsTheFlopsOfAForward) {
  const Training found = model_from_json(with_members(R"("repeat": 2, "attention_width": 6,
      "matrices": [{"name": "w", "rows": 8, "cols": 4}])",
                                                      R"({"sequence": 9, "outside_elements": 7,
      "outside_flops": 1.5})"))
                             .training;
  EXPECT_EQ(token_flops(found, UnitIndex(1), 100), 2 * 32 + 2 * 6 * 9);
  EXPECT_EQ(forward_flops(found, 100), 100 * (2 * (2 * 32 + 2 * 6 * 9) + 1.5));
  EXPECT_EQ(forward_flops(found, 5), 5 * (2 * (2 * 32 + 2 * 6 * 5) + 1.5));
}

// Blocks of columns are parts of a matrix that is multiplied as a whole.
TEST(Training, CountsWholeMatricesWhateverMuonTakesApart) {
  const Training found = model_from_json(with_members(R"("matrices": [
        {"name": "c_attn", "rows": 4, "cols": 12, "column_blocks": 3, "transposed": true}])"))
                             .training;
  EXPECT_EQ(found.unit_flops, PerUnit{2 * 4 * 12});
}

TEST(Training, AddsEntriesOfOneUnit) {
  const Training found = model_from_json(R"({"schema_version": 1, "name": "n", "description": "d",
      "source": "s", "stand_in": true, "units": [
      {"name": "", "unit": 2, "attention_width": 1, "matrices": [
        {"name": "first", "rows": 8, "cols": 4}]},
      {"name": "block", "unit": 0, "matrices": [{"name": "w", "rows": 2, "cols": 3}]},
      {"name": "", "unit": 2, "tokens": 3, "attention_width": 1, "matrices": [
        {"name": "last", "rows": 5, "cols": 6}]}]})")
                             .training;
  EXPECT_EQ(found.unit_flops, (PerUnit{2 * 6, 0, 2 * (32 + 3 * 30)}));
  EXPECT_EQ(found.attention_flops, (PerUnit{0, 0, 2 + 3 * 2}));
}

TEST(Training, NamesThePlaceOfWhatIsWrong) {
  const std::string matrices = R"(, "matrices": [])";
  const auto of = [&](const std::string& members) {
    return plan::message_of([&] { model_from_json(with_members(members)); });
  };
  EXPECT_EQ(of(R"("tokens": 0)" + matrices),
            "model.units[0].tokens: expected a number in [1e-06, 1e+06]; got 0");
  EXPECT_NE(of(R"("tokens": -1)" + matrices).find("model.units[0].tokens"), std::string::npos);
  EXPECT_NE(of(R"("tokens": "1")" + matrices).find("model.units[0].tokens"), std::string::npos);
  EXPECT_EQ(of(R"("attention_width": -1)" + matrices),
            "model.units[0].attention_width: expected a number in [0, 2.14748e+09]; got -1");
  EXPECT_EQ(of(R"("causal": 1)" + matrices),
            "model.units[0].causal: expected true or false; got 1");
  const auto of_active = [&](const std::string& active) {
    return of(R"("matrices": [{"name": "m", "rows": 2, "cols": 1, "num_matrices": 4, "active": )" +
              active + "}]");
  };
  const std::string expected =
      "model.units[0].matrices[0].active: expected a whole number in [0, 4]; got ";
  EXPECT_EQ(of_active("4"), "");
  EXPECT_EQ(of_active("5"), expected + "5");
  EXPECT_EQ(of_active("-1"), expected + "-1");
  EXPECT_EQ(of_active("1.5"), expected + "1.5");

  const auto of_training = [&](const std::string& training) {
    return plan::message_of([&] { model_from_json(with_members(R"("matrices": [])", training)); });
  };
  EXPECT_EQ(of_training("[]"), "model.training: expected an object; got an array of 0");
  EXPECT_EQ(of_training("{}"), "model.training: expected a member 'outside_elements'; got none");
  EXPECT_EQ(of_training(R"({"sequence": 0})"),
            "model.training.sequence: expected a whole number in [1, 2147483647]; got 0");
  EXPECT_NE(of_training(R"({"sequence": 1, "outside_elements": -1})")
                .find("model.training.outside_elements"),
            std::string::npos);
  const std::string outside = R"({"sequence": 1, "outside_elements": 0, "outside_flops": )";
  EXPECT_NE(of_training(outside + "-1}").find("model.training.outside_flops"), std::string::npos);
  EXPECT_EQ(of_training(outside + "0}"), "");
}

// Published counts of all parameters, to the last one where checkpoints show it: Hugging Face's
// Qwen2.5 and Llama 3, DeepSeek-V3 and Kimi K2 without multi-token prediction. Kimi K2's report
// rounds it to 1.04 * 10^12. The others have no such count.
TEST(Training, HasAllParametersOfPublishedModels) {
  const std::map<std::string, std::int64_t> published = {{"deepseek-v3", 671'026'419'200},
                                                         {"kimi-k2", 1'026'408'232'448},
                                                         {"llama-3-70b", 70'553'706'496},
                                                         {"qwen2.5-7b", 7'615'616'512},
                                                         {"qwen2.5-vl-3b", 3'754'622'976}};
  for (const auto& [name, count] : published) {
    const Model found = model(name);
    EXPECT_EQ(num_elements(found) + found.training.outside_elements, count) << name;
  }
  EXPECT_NEAR(static_cast<double>(published.at("kimi-k2")), 1.04e12, 0.015 * 1.04e12);
}

// Near the sizes in words: "3.3B" with its embedding, "4B", and "5B" with a guessed fifth.
TEST(Training, HasAboutTheParametersOfModelsThatMoveRobots) {
  const std::map<std::string, double> words = {
      {"pi0", 3.3e9}, {"wall-oss-0.5", 4e9}, {"wall-wm", 5.8e9}};
  for (const auto& [name, count] : words) {
    const Model found = model(name);
    const auto all = static_cast<double>(num_elements(found) + found.training.outside_elements);
    EXPECT_NEAR(all, count, 0.05 * count) << name;
  }
}

TEST(Training, OfEveryModelIsComplete) {
  for (const std::string& name : model_names()) {
    const Model found = model(name);
    const int num_units = found.inventory.back().unit + 1;
    EXPECT_GE(found.training.sequence, 512) << name;
    EXPECT_GT(found.training.outside_elements, 0) << name;
    EXPECT_GT(found.training.outside_flops, 0) << name;
    EXPECT_EQ(found.training.unit_flops.size(), num_units) << name;
    EXPECT_EQ(found.training.attention_flops.size(), num_units) << name;
    EXPECT_GT(sum(found.training.attention_flops), 0) << name;
  }
}

// q and o of 3584 x 3584, k and v of 512 x 3584, gate, up and down of 18944 x 3584; 28 heads of
// 128.
TEST(Training, OfAQwenLayerIsTwoFlopsAnElement) {
  const Training found = model("qwen2.5-7b").training;
  ASSERT_EQ(found.unit_flops.size(), 28);
  for (const UnitIndex unit : found.unit_flops.indices()) {
    EXPECT_EQ(found.unit_flops[unit], 2 * 233'046'016.);
    EXPECT_EQ(found.attention_flops[unit], 2 * 3584);
  }
  EXPECT_EQ(found.outside_flops, 2 * 152064. * 3584);
}

// What is published as active includes the embedding, a lookup: 37 * 10^9 and 32 * 10^9 elements.
TEST(Training, OfMixturesCountsActiveExperts) {
  const auto active = [](const Training& training) {
    return (sum(training.unit_flops) + training.outside_flops) / 2;
  };
  // A layer: attention 101,122,048, 8 routed experts and the shared one of 44,040,192, the router
  // 384 x 7168. The dense one has nine experts' elements and no router.
  const Training kimi = model("kimi-k2").training;
  EXPECT_EQ(sum(kimi.unit_flops) / 2, 61 * (101'122'048. + 9 * 44'040'192.) + 60 * 384. * 7168);
  EXPECT_EQ(kimi.attention_flops[UnitIndex(0)], 2 * 64 * (192 + 128) / 2);
  EXPECT_NEAR(active(kimi), 32e9, 1e9);
  EXPECT_NEAR(active(model("deepseek-v3").training), 37e9, 1e9);
}

}  // namespace
}  // namespace dmuon::catalog
