#include "dmuon/newton_schulz/coefficients.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "dmuon/core/error.h"
#include "dmuon/core/named.h"

namespace dmuon::newton_schulz {
namespace {

constexpr int kMaxSteps = 99;

// A table maps [0, 1] onto [~0, ~1]; rounding can lift a singular value past 1, where the next row
// would throw it far off. Dividing the argument by s keeps a margin; the last row repeats, and
// carries what is near 1 to 1.
Coefficients with_safety_factor(Coefficients rows, double s) {
  for (std::size_t i = 0; i + 1 < rows.size(); ++i) {
    rows[i].a /= s;
    rows[i].b /= s * s * s;
    rows[i].c /= s * s * s * s * s;
  }
  return rows;
}

Coefficients deepseek_v4() {
  Coefficients rows(8, {3.4445, -4.7750, 2.0315});
  rows.insert(rows.end(), 2, {2.0, -1.5, 0.5});
  return rows;
}

struct Set {
  std::string_view name;
  Coefficients rows;
  bool is_schedule = false;  // exists for as many steps as it has rows alone
};

const std::vector<Set>& known_sets() {
  static const std::vector<Set> kSets = {
      {"polar_express",
       with_safety_factor({{8.28721201814563, -23.595886519098837, 17.300387312530933},
                           {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                           {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                           {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                           {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
                           {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
                           {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
                           {1.875, -1.25, 0.375}},
                          1.05)},
      {"quintic", {{3.4445, -4.7750, 2.0315}}},
      {"you",
       {{4.0848, -6.8946, 2.9270},
        {3.9505, -6.3029, 2.6377},
        {3.7418, -5.5913, 2.3037},
        {2.8769, -3.1427, 1.2046},
        {2.8366, -3.0525, 1.2012}}},
      {"cans", with_safety_factor({{8.4703, -25.1081, 18.6293},
                                   {4.1828, -3.1087, 0.5806},
                                   {3.9619, -2.9541, 0.5630},
                                   {3.2866, -2.4647, 0.5074},
                                   {2.2737, -1.6447, 0.4162}},
                                  1.02)},
      {"deepseekv4", deepseek_v4(), true},
      {"cubic5",
       with_safety_factor({{3.3656576, -3.3420992, 0},
                           {2.5744352, -1.4957376, 0},
                           {2.5368962, -1.4312570, 0},
                           {2.4418906, -1.2764040, 0},
                           {2.2230472, -0.9630650, 0}},
                          1.01),
       true},
  };
  return kSets;
}

}  // namespace

Coefficients resolve(std::string_view name, int num_steps) {
  const char* expected = "resolve: coefficients must be rows (a, b, c) or";
  core::require(name != "aol",
                "resolve: expected a set of dmuon's; got 'aol', which needs its authors' scaling: "
                "after a division by the norm it maps singular values above 0.88 to negative ones");
  const Set& set = core::named(known_sets(), name, expected, &Set::name);
  core::require(!set.is_schedule || num_steps == std::ssize(set.rows),
                "resolve: num_steps must be ", set.rows.size(), ", the steps of '", name, "'; got ",
                num_steps);
  return resolve(set.rows, num_steps);
}

Coefficients resolve(const Coefficients& rows, int num_steps) {
  core::require(0 <= num_steps && num_steps <= kMaxSteps, "resolve: num_steps must be in [0, ",
                kMaxSteps, "]; got ", num_steps);
  core::require(!rows.empty() || num_steps == 0,
                "resolve: coefficients must have at least one row (a, b, c); got none");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& [a, b, c] = rows[i];
    core::require(std::isfinite(a) && std::isfinite(b) && std::isfinite(c),
                  "resolve: coefficients[", i, "] must be finite; got (", a, ", ", b, ", ", c, ")");
  }
  Coefficients steps(rows.begin(),
                     rows.begin() + std::min<std::ptrdiff_t>(std::ssize(rows), num_steps));
  while (std::ssize(steps) < num_steps) steps.push_back(rows.back());
  return steps;
}

std::optional<flops::Segments> measured_segments(const Coefficients& rows, std::int64_t m,
                                                 std::int64_t n, at::ScalarType dtype) {
  constexpr int kSteps = 5;
  const auto side = static_cast<double>(std::min(m, n));
  const double ratio = static_cast<double>(std::max(m, n)) / side;
  const bool quintic = rows == resolve("quintic", kSteps);
  if (!quintic && rows != resolve("you", kSteps) && rows != resolve("polar_express", kSteps)) {
    return std::nullopt;
  }
  if (side < 128 || side > 4096) return std::nullopt;
  if (dtype == at::kHalf) return flops::Segments{2, 1, 2};
  if (dtype != at::kBFloat16) return std::nullopt;
  if (side < 256) return ratio < 2 ? std::nullopt : std::optional(flops::Segments{2, 1, 2});
  if (ratio < (quintic || side <= 1024 ? 1.5 : 2.5)) return std::nullopt;
  if (!quintic) return flops::Segments{2, 1, 2};
  return ratio < 3 ? flops::Segments{3, 1, 1} : flops::Segments{3, 2};
}

}  // namespace dmuon::newton_schulz
