// The command `dmuon`: what a user asks before there is a GPU to ask.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <exception>
#include <iostream>
#include <limits>

#include "dmuon/catalog/catalog.h"
#include "dmuon/cli/commands.h"
#include "dmuon/core/error.h"
#include "dmuon/core/text.h"

namespace dmuon::cli {
namespace {

using core::joined;

constexpr std::uint64_t kMostBytes = std::numeric_limits<std::int64_t>::max();

void add_task_options(CLI::App& app, Task& task, bool required) {
  app.add_option("--model", task.model, "one of: " + joined(catalog::model_names()));
  app.add_option("--inventory", task.inventory,
                 "instead: a JSON file, as dmuon.inventory(model) returns it");
  app.add_option("--mesh", task.mesh, "nodes x GPUs a node: 2x8; or 8")->required(required);
  app.add_option("--tp", task.tensor_parallel, "ranks that every matrix is sharded over")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--device", task.device,
                 "cost model: " + joined(catalog::device_names()) + " [a100-sxm4-80gb]");
  app.add_option("--costs", task.costs, "instead: a JSON file of measured costs");
  app.add_option("--lookahead", task.options.lookahead, "units that travel at the same time")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--layout-slack", task.options.layout_slack,
                 "share of the makespan given up for a better spread over columns")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--max-memory", task.options.max_memory_bytes,
                 "bytes that no rank may exceed, 80GB or 80GiB say (0: no limit)")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::Range(std::uint64_t{0}, kMostBytes).description(""));
  app.add_flag("!--no-node-copy", task.options.node_copy,
               "columns do not keep what came from other nodes");
}

// What is wrong with the arguments, in one line; CLI11 itself adds others.
int complain(const CLI::ParseError& error) {
  std::string text = error.what();
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::cerr << "dmuon: " << text << "\n";
  return 2;
}

int run(int argc, char** argv) {
  CLI::App app{"Owner plans of dmuon, the distributed Muon: who orthogonalises which matrix."};
  app.set_version_flag("--version", DMUON_VERSION);
  app.require_subcommand(0, 1);  // or a mistyped one would only be missing
  app.footer("Example: dmuon plan --model qwen2.5-7b --mesh 2x8 --device a800-sxm4-80gb");

  Task task;
  std::string strategy = "load_balance";
  PlanOutput output;
  const std::vector<std::string> strategies = strategy_names();
  CLI::App& plan = *app.add_subcommand("plan", "Plans a model on a mesh and shows every owner.");
  add_task_options(plan, task, true);
  plan.add_option("--strategy", strategy, joined(strategies) + " (needs SciPy)")
      ->check(CLI::IsMember(strategies).description(""))
      ->capture_default_str();
  plan.add_option("--save", output.save, "file for the plan (dedicate_params(..., plan=file))");
  plan.add_flag("--json", output.json, "prints the plan as JSON");
  plan.add_option("--plot", output.plot, "SVG file for a picture");
  plan.footer("Example: dmuon plan --model pi0 --mesh 16x8 --save plan.json --plot plan.svg");

  bool json = false;
  std::vector<std::string> files;
  CLI::App& compare =
      *app.add_subcommand("compare", "Every strategy side by side; or two saved plans.");
  add_task_options(compare, task, false);
  compare.add_flag("--json", json, "prints the table as JSON");
  const std::vector<CLI::Option*> of_a_model = compare.get_options();
  CLI::Option& plans = *compare.add_option("plans", files, "two plan files instead of a model");
  for (CLI::Option* option : of_a_model) {
    if (option != compare.get_help_ptr()) plans.excludes(option);
  }
  compare.footer("Examples: dmuon compare --model pi0 --mesh 16x8; dmuon compare a.json b.json");

  CLI::App& models = *app.add_subcommand("models", "Lists the models and devices that it knows.");
  models.footer("Example: dmuon models");

  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty())
      throw CLI::RequiredError("A command: plan, compare or models");
    if (plan.parsed()) plan_command(task, strategy, output, std::cout);
    if (compare.parsed() && !files.empty()) compare_plans_command(files, std::cout);
    if (compare.parsed() && files.empty()) {
      if (task.mesh.empty()) throw CLI::RequiredError("--mesh, or two plan files,");
      compare_command(task, json, std::cout);
    }
    if (models.parsed()) models_command(std::cout);
    std::cout.flush();
    core::require(std::cout.good(), "dmuon: cannot write to standard output");
    return 0;
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error) : complain(error);
  }
}

}  // namespace
}  // namespace dmuon::cli

int main(int argc, char** argv) {
  try {
    return dmuon::cli::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
