#include "dmuon/plan/state_bytes.h"

#include "dmuon/core/named.h"

namespace dmuon::plan {
namespace {

constexpr std::int64_t kFloatBytes = 4;

// Counts of fp32 values.
struct Rule {
  std::string_view name;
  std::int64_t an_element;  // master, gradient, momentum, ...
  std::int64_t a_neuron;    // a neuron is a row of an [out, in] matrix
  std::int64_t of_update;   // an element, while a batch is updated
};

constexpr Rule kRules[] = {
    {"muon", 3, 0, 0},
    {"normuon", 3, 1, 1},
    {"adamuon", 4, 0, 2},
};

const Rule& find_rule(std::string_view name) {
  return core::named(kRules, name, "plan: rule: expected", &Rule::name);
}

}  // namespace

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const Rule& rule : kRules) names.emplace_back(rule.name);
  return names;
}

std::int64_t state_bytes(const Shape& shape, std::string_view rule) {
  const Rule& of = find_rule(rule);
  const std::int64_t neurons = shape.num_matrices * (shape.transposed ? shape.cols : shape.rows);
  return kFloatBytes * (of.an_element * shape.num_elements() + of.a_neuron * neurons);
}

std::int64_t rule_update_bytes(std::string_view rule) {
  return kFloatBytes * find_rule(rule).of_update;
}

}  // namespace dmuon::plan
