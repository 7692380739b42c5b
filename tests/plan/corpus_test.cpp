// Files that are no plan, no costs and no model, though all of them look like one but for a detail,
// and files that are. The first word of a name says what one looks like.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>

#include "dmuon/catalog/catalog.h"
#include "dmuon/plan/plan.h"
#include "tests/plan/message_of.h"

namespace dmuon::plan {
namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// By the first word of a file's name.
const std::map<std::string, std::function<void(const std::string&)>> kReaders = {
    {"plan", [](const std::string& text) { from_json(text); }},
    {"costs", [](const std::string& text) { costs_from_json(text); }},
    {"model", [](const std::string& text) { catalog::model_from_json(text); }},
};

// What the reader that a file is meant for says about it; all of them, for "any".
const std::map<std::string, std::string> kMessages = {
    {"any_array", "expected an object; got an array of 3"},
    {"any_blank", "expected JSON; "},
    {"any_comment", "expected JSON; "},
    {"any_cut_utf8", "ill-formed UTF-8 byte"},
    {"any_empty", "unexpected end of input"},
    {"any_nan", "expected JSON; "},
    {"any_not_utf8", "ill-formed UTF-8 byte"},
    {"any_nul", "expected JSON; "},
    {"any_null", "expected an object; got null"},
    {"any_number", "expected JSON; "},
    {"any_trailing", "expected end of input"},
    {"any_unquoted", "expected JSON; "},
    {"costs_no_source", "costs: expected a member 'source'; got none"},
    {"costs_size_zero", "costs.shapes[0].batches[0].size: expected a whole number in [1, "},
    {"costs_sizes_as_text", "costs.shapes[0].batches[0].size: expected a whole number in [1, "},
    {"costs_time_2e63", "costs.shapes[0].batches[0].ns: expected a whole number in [0, "},
    {"costs_time_in_halves", "costs.shapes[0].batches[0].ns: expected a whole number in [0, "},
    {"costs_time_negative", "costs.shapes[0].batches[0].ns: expected a whole number in [0, "},
    {"model_names_repeat", "parameter 'layers.up' must occur once"},
    {"model_repeat_huge", "model.units[0].repeat: expected a whole number in [1, 4194304]"},
    {"model_repeat_of_many", "model.units: expected at most 4194304 matrices"},
    {"model_repeat_of_stacks", "model.units: expected at most 4194304 matrices"},
    {"model_rows_zero", "model.units[0].matrices[0].rows: expected a whole number in [1, "},
    {"model_stack_huge", "model.units[0].matrices[1].stack: expected a whole number in [1, "},
    {"model_stand_in_text", "model.stand_in: expected true or false; got \"no\""},
    {"model_units_object", "model.units: expected an array; got an object of 1"},
    {"plan_batch_of_strings", "plan.batches[0].matrices[0]: expected a whole number"},
    {"plan_batch_without_cost", "must have a time for a batch of 2 of 4 x 4"},
    {"plan_bound_2e62", "plan.certificate.bound_ns: expected a whole number in [0, "},
    {"plan_duplicate_matrix", "parameter 'layers.0.up' must occur once"},
    {"plan_huge_matrices", "plan.assignments[0].rows: expected a whole number in [1, "},
    {"plan_loads_overflow", "ns"},
    {"plan_lookahead_string", "plan.options.lookahead: expected a whole number"},
    {"plan_matrix_in_no_batch", "must be in a batch; it is in none"},
    {"plan_matrix_in_two_batches", "must be in one batch; it is again in batches["},
    {"plan_no_version", "plan: expected a member 'schema_version'; got none"},
    {"plan_old_version", "plan.schema_version: expected 4; got 3"},
    {"plan_owner_negative", "plan.assignments[0].owner: expected a whole number"},
    {"plan_owner_out_of_range", "owner of parameter 'layers.0.up' must be in [0, 2); got 2"},
    {"plan_prices_missing", "the prices are not one a shape"},
    {"plan_prices_overflow", "plan.certificate: expected a proof of 1152921504606846976 ns"},
    {"plan_ranks_overflow", "num_replicates * num_shards * tensor_parallel must be <= "},
    {"plan_shards_1.9", "plan.mesh.num_shards: expected a whole number"},
    {"plan_shards_2e63", "plan.mesh.num_shards: expected a whole number"},
    {"plan_shards_huge", "num_replicates * num_shards * tensor_parallel must be <= "},
    {"plan_too_many_elements", "must not take all matrices past"},
    {"plan_truncated", "expected JSON; "},
    {"plan_unproved_bound", "plan.certificate: expected a proof of 1501 ns"},
};

TEST(Corpus, IsRejectedByEveryReaderForItsReason) {
  std::size_t num_files = 0;
  for (const auto& entry : fs::directory_iterator(DMUON_CORPUS)) {
    if (entry.is_directory()) continue;
    ++num_files;
    const std::string name = entry.path().stem().string();
    const auto expected = kMessages.find(name);
    ASSERT_NE(expected, kMessages.end()) << name;
    const std::string text = text_of(entry.path());
    for (const auto& [kind, reader] : kReaders) {
      const std::string message = message_of([&, &read = reader] { read(text); });
      EXPECT_NE(message, "") << kind << " took " << name;
      if (name.rfind(kind, 0) != 0 && name.rfind("any", 0) != 0) continue;
      EXPECT_NE(message.find(expected->second), std::string::npos) << name << ": " << message;
    }
  }
  EXPECT_EQ(num_files, kMessages.size());
}

TEST(Corpus, DiffersInItsDetailsFromWhatIsAccepted) {
  for (const auto& [kind, reader] : kReaders) {
    const std::string text = text_of(fs::path(DMUON_CORPUS) / "valid" / (kind + ".json"));
    EXPECT_EQ(message_of([&, &read = reader] { read(text); }), "");
  }
}

// Recursion would end in the stack: 100,000 levels alone, as a member that is read, and as one that
// is not.
TEST(Corpus, OfDeepNestingIsRejectedByEveryReader) {
  for (const std::string& level : {std::string("["), std::string("{\"a\":")}) {
    std::string open;
    std::string closed;
    for (int i = 0; i < 100'000; ++i) {
      open += level;
      closed += level == "[" ? "]" : "}";
    }
    const std::string nested = open + (level == "[" ? "" : "1") + closed;
    for (const std::string& text :
         {open, "{\"schema_version\":" + nested + "}",
          "{\"schema_version\":1,\"source\":" + nested + ",\"name\":" + nested + "}",
          "{\"schema_version\":4,\"mesh\":" + nested + "}",
          "{\"unknown\":" + nested + ",\"schema_version\":4}"}) {
      for (const auto& [kind, reader] : kReaders) {
        EXPECT_NE(message_of([&, &read = reader] { read(text); }), "") << kind;
      }
    }
  }
}

}  // namespace
}  // namespace dmuon::plan
