#include "dmuon/plan/state_bytes.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <system_error>
#include <utility>

#include "dmuon/core/named.h"

namespace dmuon::plan {
namespace {

constexpr std::int64_t kFloatBytes = 4;
constexpr double kMostBytes = 0x1p62;
constexpr std::string_view kExpected = "plan: rule: expected";

// Counts of fp32 values.
struct Rule {
  std::string_view name;
  std::int64_t an_element;    // master, gradient, momentum, ...
  std::int64_t a_neuron;      // a neuron is a row of an [out, in] matrix
  std::int64_t of_update;     // an element, while a batch is updated
  std::int64_t an_input = 0;  // an input is a column of an [out, in] matrix
  std::int64_t a_matrix = 0;
};

constexpr Rule kRules[] = {
    {"muon", 3, 0, 0},
    {"normuon", 3, 1, 1},
    {"adamuon", 4, 0, 2},
};

// Returns 0 for `own`, the matrix's own side, and the number for a number.
std::optional<std::int64_t> side_of(std::string_view text, std::string_view own) {
  if (text == own) return 0;
  std::int64_t side = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), side);
  if (error != std::errc() || end != text.data() + text.size() || side < 1 || side > kMostOfState)
    return std::nullopt;
  return side;
}

// Adds a state "rows x cols". Returns false if the text is none.
bool add_state(Rule& rule, std::string_view text) {
  constexpr std::string_view kTimes = " x ";
  const std::size_t times = text.find(kTimes);
  if (times == std::string_view::npos) return false;
  const auto rows = side_of(text.substr(0, times), "rows");
  const auto cols = side_of(text.substr(times + kTimes.size()), "cols");
  if (!rows || !cols) return false;
  if (*rows == 0 && *cols == 0) {
    ++rule.an_element;
    ++rule.of_update;
  } else if (*rows == 0) {
    rule.a_neuron += *cols;
  } else if (*cols == 0) {
    rule.an_input += *rows;
  } else {
    rule.a_matrix += *rows * *cols;
  }
  return true;
}

// A function of the user's reads copies of update and weights, and returns a third matrix.
std::optional<Rule> users_rule(std::string_view text) {
  const std::size_t begin = text.find('[');
  if (begin == std::string_view::npos || begin == 0 || text.back() != ']') return std::nullopt;
  Rule rule{text.substr(0, begin), 3, 0, 3};
  std::string_view states = text.substr(begin + 1, text.size() - begin - 2);
  constexpr std::string_view kComma = ", ";
  for (bool more = !states.empty(); more;) {
    const std::size_t end = std::min(states.find(kComma), states.size());
    if (!add_state(rule, states.substr(0, end))) return std::nullopt;
    more = end < states.size();
    states.remove_prefix(more ? end + kComma.size() : end);
  }
  return rule;
}

Rule find_rule(std::string_view name, std::string_view expected) {
  if (const std::optional<Rule> rule = users_rule(name)) return *rule;
  return core::named(kRules, name, expected, &Rule::name);
}

}  // namespace

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const Rule& rule : kRules) names.emplace_back(rule.name);
  return names;
}

void require_rule(std::string_view rule, std::string_view expected) { find_rule(rule, expected); }

std::int64_t state_bytes(const Shape& shape, std::string_view rule) {
  const Rule of = find_rule(rule, kExpected);
  std::int64_t neurons = shape.num_matrices * shape.rows;
  std::int64_t inputs = shape.num_matrices * shape.cols;
  if (shape.transposed) std::swap(neurons, inputs);
  double bytes = 0;  // exact up to 2^53, and never overflows
  std::int64_t sum = 0;
  for (const auto& [values, times] : {std::pair{of.an_element, shape.num_elements()},
                                      {of.a_neuron, neurons},
                                      {of.an_input, inputs},
                                      {of.a_matrix, shape.num_matrices}}) {
    bytes += 4.0 * static_cast<double>(values) * static_cast<double>(times);
    core::require(bytes < kMostBytes, "plan: rule: expected states of less than 2^62 bytes, got '",
                  rule, "'");
    sum += kFloatBytes * values * times;
  }
  return sum;
}

std::int64_t rule_update_bytes(std::string_view rule) {
  return kFloatBytes * find_rule(rule, kExpected).of_update;
}

}  // namespace dmuon::plan
