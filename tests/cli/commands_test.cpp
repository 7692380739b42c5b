#include "dmuon/cli/commands.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "tests/plan/message_of.h"

namespace dmuon::cli {
namespace {

namespace fs = std::filesystem;
using plan::message_of;

// A folder of its own, gone afterwards.
class Commands : public testing::Test {
 protected:
  Commands()
      : folder_(fs::path(testing::TempDir()) / ("dmuon_commands_" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~Commands() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

 private:
  fs::path folder_;
};

TEST(ParseMesh, TakesNodesByGpusOrGpus) {
  EXPECT_EQ(parse_mesh("2x8", 1), (plan::Mesh{2, 8}));
  EXPECT_EQ(parse_mesh("8", 1), (plan::Mesh{1, 8}));
  EXPECT_EQ(parse_mesh("16x4", 2), (plan::Mesh{16, 4, 2}));
}

TEST(ParseMesh, RejectsAnythingElseByTheOptionsName) {
  for (const char* text : {"", "x", "2x", "x8", "0x8", "8x0", "2y8", "2x8x2", "-2x8", "+2x8",
                           "2 x 8", " 2x8", "2x8 ", "2X8", "99999999999x8", "1.5x8", "0"}) {
    EXPECT_NE(message_of([&] { parse_mesh(text, 1); }).find("--mesh"), std::string::npos) << text;
  }
  EXPECT_NE(message_of([] { parse_mesh("2097152", 1); }), "");
  EXPECT_NE(message_of([] { parse_mesh("1024x1024", 2); }), "");
}

TEST_F(Commands, ReadBackWhatTheyWrote) {
  const std::string text("bytes \0 \r\n \xff", 12);
  write_file(path("file"), text);
  EXPECT_EQ(read_file(path("file")), text);
  write_file(path("file"), "shorter");
  EXPECT_EQ(read_file(path("file")), "shorter");
}

TEST_F(Commands, NameTheFileThatCannotBeReadOrWritten) {
  for (const std::string& name : {path("missing"), path("empty"), path("")}) {
    if (name == path("empty")) std::fclose(std::fopen(name.c_str(), "w"));
    EXPECT_NE(message_of([&] { read_file(name); }).find("'" + name + "'"), std::string::npos)
        << name;
  }
  for (const std::string& name : {path("missing/file"), path(""), std::string("/dev/full")}) {
    EXPECT_NE(message_of([&] { write_file(name, "text"); }).find("'" + name + "'"),
              std::string::npos);
  }
}

Task small_task(const std::string& file) {
  write_file(file, R"({"schema_version": 1, "name": "small", "description": "", "source": "",
    "stand_in": false, "units": [{"name": "l{}", "repeat": 4, "matrices": [
      {"name": "a", "rows": 64, "cols": 64}, {"name": "b", "rows": 64, "cols": 256}]}]})");
  Task task;
  task.inventory = file;
  task.mesh = "2x2";
  return task;
}

TEST_F(Commands, ComparePlansByTheirFiguresAndByWhatMoved) {
  const Task task = small_task(path("model.json"));
  std::ostringstream ignored;
  plan_command(task, "round_robin", {path("first.json"), false, ""}, ignored);
  plan_command(task, "rank0", {path("second.json"), false, ""}, ignored);
  std::ostringstream out;
  compare_plans_command({path("first.json"), path("second.json")}, out);
  const std::string text = out.str();
  EXPECT_NE(text.find("round_robin  " + path("first.json")), std::string::npos);
  EXPECT_NE(text.find("l0.b: owner 1 -> 0\n"), std::string::npos);
  EXPECT_EQ(text.find("l0.a: "), std::string::npos);
  EXPECT_NE(text.find("6 of 8 matrices have another owner\n"), std::string::npos);
  EXPECT_NE(message_of([&] { compare_plans_command({path("first.json")}, out); }), "");
}

TEST_F(Commands, CompareShowsEveryStrategyAsTextAndAsJson) {
  const Task task = small_task(path("model.json"));
  std::ostringstream text;
  compare_command(task, false, text);
  std::ostringstream json;
  compare_command(task, true, json);
  const auto rows = nlohmann::json::parse(json.str());
  ASSERT_EQ(rows.size(), 6U);
  EXPECT_EQ(rows.back()["strategy"], "milp");
  for (const auto& row : rows) {
    EXPECT_NE(text.str().find(row["strategy"].get<std::string>()), std::string::npos);
    // Its own test has a Python with SciPy; here one may be missing.
    if (row["strategy"] == "milp" && row.contains("error")) continue;
    for (const char* key : {"makespan_ms", "bound_ms", "gap", "memory_gib", "distinct_columns"}) {
      EXPECT_TRUE(row.contains(key)) << key;
    }
    EXPECT_LE(rows[0]["bound_ms"], row["makespan_ms"]);
  }
}

TEST_F(Commands, PlanMarksEveryMatrixAsShardedWithTensorParallelism) {
  Task task = small_task(path("model.json"));
  const auto sharded = [&] {
    std::ostringstream out;
    plan_command(task, "rank0", {"", true, ""}, out);
    return nlohmann::json::parse(out.str())["assignments"][0]["tensor_parallel"].get<bool>();
  };
  EXPECT_FALSE(sharded());
  task.tensor_parallel = 2;
  EXPECT_TRUE(sharded());
}

TEST_F(Commands, AskForOneModelAndOneKindOfCosts) {
  std::ostringstream out;
  const auto of = [&](const Task& task) {
    return message_of([&] { compare_command(task, false, out); });
  };
  Task task = small_task(path("model.json"));
  task.model = "pi0";
  EXPECT_NE(of(task).find("--model or --inventory"), std::string::npos);
  task.model = task.inventory = "";
  EXPECT_NE(of(task).find("--model or --inventory"), std::string::npos);
  task = small_task(path("model.json"));
  task.device = "cpu";
  task.costs = path("costs.json");
  EXPECT_NE(of(task).find("--device or --costs"), std::string::npos);
}

}  // namespace
}  // namespace dmuon::cli
