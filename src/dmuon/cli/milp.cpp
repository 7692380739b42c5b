#include "dmuon/cli/milp.h"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

#include "dmuon/cli/commands.h"
#include "dmuon/core/error.h"
#include "dmuon/plan/json_reader.h"

namespace dmuon::cli {
namespace {

namespace fs = std::filesystem;

// By its path: importing dmuon would import torch.
constexpr const char* kProgram =
    "import importlib.util as u, os, runpy, sys; s = u.find_spec('dmuon'); "
    "sys.exit('no dmuon there; is its environment active?') if s is None else None; "
    "runpy.run_path(os.path.join(os.path.dirname(s.origin), '_planning', 'milp.py'), "
    "run_name='__main__')";

std::string python() {
  if (const char* named = std::getenv("DMUON_PYTHON")) return named;
  std::error_code ignored;
  const fs::path here = fs::read_symlink("/proc/self/exe", ignored).parent_path() / "python3";
  return fs::exists(here, ignored) ? here.string() : "python3";
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::string json_of(const balance::Instance& instance) {
  auto shapes = nlohmann::json::array();
  for (const balance::Shape& shape : instance.shapes) {
    auto batches = nlohmann::json::array();
    for (const balance::BatchTime& batch : shape.batches) {
      batches.push_back({{"size", batch.size}, {"ns", batch.ns}});
    }
    shapes.push_back({{"num_matrices", shape.num_matrices}, {"batches", std::move(batches)}});
  }
  return plan::dump_json({{"num_owners", instance.num_owners}, {"shapes", std::move(shapes)}});
}

// A file of its own that goes with the object.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text)
      : path_((fs::temp_directory_path() / "dmuon-milp-XXXXXX").string()) {
    const int file = mkstemp(path_.data());
    core::require(file >= 0, "milp: cannot write '", path_, "'");
    close(file);
    write_file(path_, text);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { std::remove(path_.c_str()); }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string text_of(const std::string& path) {  // which may be empty
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  const std::size_t line = text.rfind('\n');
  return line == std::string::npos ? text : text.substr(line + 1);
}

}  // namespace

std::vector<std::vector<int>> milp_counts(const balance::Instance& instance) {
  const TemporaryFile input(json_of(instance));
  const TemporaryFile complaints("");  // apart from the answer; shown if there is none
  const std::string command = quoted(python()) + " -c " + quoted(kProgram) + " < " +
                              quoted(input.path()) + " 2> " + quoted(complaints.path());
  FILE* process = popen(command.c_str(), "r");
  core::require(process != nullptr, "milp: cannot start ", python());
  std::string text;
  std::array<char, 4096> part{};
  for (std::size_t n = 0; (n = std::fread(part.data(), 1, part.size(), process)) > 0;) {
    text.append(part.data(), n);
  }
  core::require(pclose(process) == 0, "milp: ", python(), ": ",
                last_line(text_of(complaints.path())));
  const nlohmann::json value = plan::parse_json(text, "milp");
  const plan::JsonReader answer(value, "milp");
  std::vector<std::vector<int>> counts;
  for (const plan::JsonReader& owner : answer.at("counts").items()) {
    counts.emplace_back();
    for (const plan::JsonReader& count : owner.items()) {
      counts.back().push_back(count.small(0, std::numeric_limits<int>::max()));
    }
  }
  if (!answer.at("proved").boolean()) {  // apart from the plan, which may be JSON on stdout
    std::cerr << "dmuon: milp: not proved optimal: SciPy ran out of time\n";
  }
  return counts;
}

}  // namespace dmuon::cli
