#include "dmuon/cli/commands.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "dmuon/catalog/catalog.h"
#include "dmuon/cli/milp.h"
#include "dmuon/cli/plot.h"
#include "dmuon/core/error.h"
#include "dmuon/plan/json_reader.h"
#include "dmuon/plan/strategy.h"

namespace dmuon::cli {
namespace {

constexpr const char* kDefaultDevice = "a100-sxm4-80gb";

// What `read` makes of a file's text; an error names the file.
template <typename Read>
auto from_file(const std::string& path, Read read) {
  const std::string text = read_file(path);
  try {
    return read(text);
  } catch (const core::InvalidArgument& error) {
    throw core::InvalidArgument(core::message("dmuon: '", path, "': ", error.what()));
  }
}

// A task with its files read.
struct Loaded {
  std::string title;
  plan::Inventory inventory;
  plan::Mesh mesh;
  plan::CostTable costs;
};

Loaded load(const Task& task) {
  core::require(task.model.empty() != task.inventory.empty(),
                "dmuon: expected --model or --inventory, one of them");
  core::require(task.device.empty() || task.costs.empty(),
                "dmuon: expected --device or --costs, got both");
  catalog::Model model = task.model.empty() ? from_file(task.inventory, catalog::model_from_json)
                                            : catalog::model(task.model);
  Loaded loaded;
  loaded.mesh = parse_mesh(task.mesh, task.tensor_parallel);
  loaded.inventory = std::move(model.inventory);
  for (plan::Matrix& matrix : loaded.inventory) matrix.tensor_parallel = task.tensor_parallel > 1;
  if (task.costs.empty()) {
    loaded.costs = plan::modelled_costs(
        plan::group_by_shape(loaded.inventory),
        catalog::device(task.device.empty() ? kDefaultDevice : task.device), task.tensor_parallel);
  } else {
    loaded.costs = from_file(task.costs, plan::costs_from_json);
  }
  loaded.title = model.name + (model.stand_in ? " (stand-in)" : "") + " on " + task.mesh;
  return loaded;
}

constexpr const char* kMilp = "milp";
constexpr std::size_t kShown = 10;  // matrices that moved

plan::Plan make(const Loaded& loaded, const std::string& strategy, const plan::Options& options) {
  if (strategy != kMilp) {
    return plan::make_plan(loaded.inventory, loaded.mesh, strategy, loaded.costs, options);
  }
  plan::validate(loaded.inventory);
  const auto instance = plan::instance_of(plan::group_by_shape(loaded.inventory), loaded.costs,
                                          loaded.mesh.num_owners(), plan::kStateBytes);
  return plan::make_plan_from_counts(loaded.inventory, loaded.mesh, strategy, milp_counts(instance),
                                     loaded.costs, options);
}

struct Row {
  std::string strategy;
  std::string error = {};  // why there is no plan; then the rest is 0
  double makespan_ms = 0;
  double bound_ms = 0;
  double gap = 0;
  double memory_gib = 0;
  plan::Spread spread = {};
  double seconds = 0;
};

Row run(const Loaded& loaded, const std::string& strategy, const plan::Options& options) {
  const auto start = std::chrono::steady_clock::now();
  plan::Plan plan;
  try {
    plan = make(loaded, strategy, options);
  } catch (const core::InvalidArgument& error) {  // too little memory; or no SciPy
    return {.strategy = strategy, .error = error.what()};
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  return {strategy,
          {},
          plan::milliseconds(plan.makespan_ns()),
          plan::milliseconds(plan.bound_ns()),
          plan.gap(),
          static_cast<double>(plan.peak_bytes()) / (1 << 30),
          plan.spread,
          taken.count()};
}

void print_json(const std::vector<Row>& rows, std::ostream& out) {
  nlohmann::json all = nlohmann::json::array();
  for (const Row& row : rows) {
    if (!row.error.empty()) {
      all.push_back({{"strategy", row.strategy}, {"error", row.error}});
      continue;
    }
    all.push_back({{"strategy", row.strategy},
                   {"makespan_ms", row.makespan_ms},
                   {"bound_ms", row.bound_ms},
                   {"gap", row.gap},
                   {"memory_gib", row.memory_gib},
                   {"distinct_columns", row.spread.distinct_columns},
                   {"busiest_column", row.spread.busiest_column},
                   {"seconds", row.seconds}});
  }
  out << plan::dump_json(all) << "\n";
}

void print_table(const Loaded& loaded, const std::vector<Row>& rows, std::ostream& out) {
  out << loaded.title << ", costs: " << loaded.costs.source << "\n"
      << "strategy      makespan ms    bound ms     gap %  memory GiB  columns  busiest  seconds\n"
      << std::fixed;
  for (const Row& row : rows) {
    if (!row.error.empty()) {
      out << std::left << std::setw(13) << row.strategy << " " << row.error << "\n";
      continue;
    }
    out << std::left << std::setw(13) << row.strategy << std::right << std::setprecision(3)
        << std::setw(12) << row.makespan_ms << std::setw(12) << row.bound_ms << std::setprecision(2)
        << std::setw(10) << row.gap * 100 << std::setw(12) << row.memory_gib << std::setw(9)
        << row.spread.distinct_columns << std::setw(9) << row.spread.busiest_column
        << std::setprecision(3) << std::setw(9) << row.seconds << "\n";
  }
  out << "memory: of the fullest rank; columns: that a window of units touches; busiest: its "
         "fullest column's bytes over the mean\n";
}

}  // namespace

std::vector<std::string> strategy_names() {
  std::vector<std::string> names = plan::strategy_names();
  names.emplace_back(kMilp);
  return names;
}

plan::Mesh parse_mesh(const std::string& text, int tensor_parallel) {
  const auto number = [&](const std::string& part) {
    int value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    core::require(error == std::errc() && end == part.data() + part.size() && value >= 1,
                  "dmuon: --mesh: expected nodes x GPUs a node such as 2x8, or 8; got '", text,
                  "'");
    return value;
  };
  const std::size_t cross = text.find('x');
  plan::Mesh mesh;
  mesh.tensor_parallel = tensor_parallel;
  if (cross == std::string::npos) {
    mesh.num_shards = number(text);
  } else {
    mesh.num_replicates = number(text.substr(0, cross));
    mesh.num_shards = number(text.substr(cross + 1));
  }
  plan::validate(mesh);
  return mesh;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  core::require(file.good(), "dmuon: cannot open '", path, "'");
  std::ostringstream text;
  text << file.rdbuf();  // of a directory or an empty file: nothing, and `text` fails
  core::require(file.good() && text.good(), "dmuon: cannot read '", path, "', or it is empty");
  return text.str();
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  core::require(file.good(), "dmuon: cannot write '", path, "'");
}

void plan_command(const Task& task, const std::string& strategy, const PlanOutput& output,
                  std::ostream& out) {
  core::require(output.plot.empty() || output.plot.ends_with(".svg"),
                "dmuon: --plot: expected a file that ends in .svg, which is what is drawn; got '",
                output.plot, "'");
  core::require(output.plot.empty() || output.plot != output.save,
                "dmuon: --save, --plot: expected two files; got '", output.plot, "' for both");
  const Loaded loaded = load(task);
  const plan::Plan plan = make(loaded, strategy, task.options);
  const bool needs_text = output.json || !output.save.empty();
  const std::string text = needs_text ? plan::to_json(plan) + "\n" : "";
  if (!output.save.empty()) write_file(output.save, text);
  if (!output.plot.empty()) write_file(output.plot, svg(plan, loaded.title));
  if (output.json) {
    out << text;
  } else {
    out << loaded.title << "\n" << plan::table(plan);
  }
}

void compare_command(const Task& task, bool json, std::ostream& out) {
  const Loaded loaded = load(task);
  std::vector<Row> rows;
  for (const std::string& strategy : strategy_names()) {
    rows.push_back(run(loaded, strategy, task.options));
  }
  const auto is_plan = [](const Row& row) { return row.error.empty(); };
  core::require(std::any_of(rows.begin(), rows.end(), is_plan), rows.front().error);
  if (json) {
    print_json(rows, out);
  } else {
    print_table(loaded, rows, out);
  }
}

void compare_plans_command(const std::vector<std::string>& files, std::ostream& out) {
  core::require(files.size() == 2, "dmuon: compare: expected two plan files; got ", files.size());
  const plan::Plan first = from_file(files[0], plan::from_json);
  const plan::Plan second = from_file(files[1], plan::from_json);
  plan::require_fit(second, first.inventory, first.mesh);
  const auto line = [&](const std::string& file, const plan::Plan& plan) {
    out << std::fixed << std::setprecision(3) << std::setw(12)
        << plan::milliseconds(plan.makespan_ns()) << std::setw(12)
        << plan::milliseconds(plan.bound_ns()) << std::setprecision(2) << std::setw(9)
        << plan.gap() * 100 << std::setw(9) << plan.spread.distinct_columns << "  " << plan.strategy
        << "  " << file << "\n";
  };
  out << " makespan ms    bound ms    gap %  columns\n";
  line(files[0], first);
  line(files[1], second);
  std::size_t num_moved = 0;
  for (std::size_t w = 0; w < first.owner.size(); ++w) {
    if (first.owner[w] == second.owner[w]) continue;
    if (num_moved++ < kShown) {
      out << first.inventory[w].name << ": owner " << first.owner[w] << " -> " << second.owner[w]
          << "\n";
    }
  }
  if (num_moved > kShown) out << "... and " << num_moved - kShown << " more\n";
  out << num_moved << " of " << first.owner.size() << " matrices have another owner\n";
}

void models_command(std::ostream& out) {
  out << "name             matrices  10^9 elements  shapes  description\n";
  for (const std::string& name : catalog::model_names()) {
    const catalog::Model model = catalog::model(name);
    double elements = 0;
    for (const plan::Matrix& matrix : model.inventory) {
      elements += static_cast<double>(matrix.num_elements());
    }
    out << std::left << std::setw(15) << name << std::right << std::setw(10)
        << model.inventory.size() << std::fixed << std::setprecision(3) << std::setw(15)
        << elements / 1e9 << std::setw(8) << plan::group_by_shape(model.inventory).shapes.size()
        << "  " << (model.stand_in ? "[stand-in] " : "") << model.description << "\n";
  }
  out << "devices:";
  for (const std::string& name : catalog::device_names()) out << " " << name;
  out << "\n";
}

}  // namespace dmuon::cli
