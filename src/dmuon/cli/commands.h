#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "dmuon/plan/options.h"
#include "dmuon/plan/plan.h"

namespace dmuon::cli {

/// What is to be planned, as it was typed.
struct Task {
  std::string model;      ///< a name that `dmuon models` shows
  std::string inventory;  ///< or a file: models/README.md says what is in it
  std::string mesh;       ///< "2x8" or "8"
  int tensor_parallel = 1;
  std::string device;  ///< whose cost model is taken
  std::string costs;   ///< or a file of measured costs
  plan::Options options;
};

struct PlanOutput {
  std::string save;  ///< a file for the plan as JSON
  bool json = false;
  std::string plot;  ///< a file for the picture
};

/// Those of plan::strategy_names and, last, milp, which needs a Python with SciPy.
std::vector<std::string> strategy_names();

/// Each writes to `out` and throws InvalidArgument with one clear sentence on bad input.
void plan_command(const Task& task, const std::string& strategy, const PlanOutput& output,
                  std::ostream& out);

/// Every strategy on one task, side by side.
void compare_command(const Task& task, bool json, std::ostream& out);

/// Two saved plans: figures side by side, then what moved.
void compare_plans_command(const std::vector<std::string>& files, std::ostream& out);

void models_command(std::ostream& out);

/// @throws InvalidArgument unless the text is "R x G" or "G" in digits, "2x8".
plan::Mesh parse_mesh(const std::string& text, int tensor_parallel);

/// @throws InvalidArgument for a file that cannot be read or written whole.
std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& text);

}  // namespace dmuon::cli
