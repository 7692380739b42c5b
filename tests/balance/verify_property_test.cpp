// Certificates of solve() are accepted, and none, drawn or corrupted, whose bound is too large.

#include <gtest/gtest.h>

#include <map>

#include "dmuon/balance/solve.h"
#include "dmuon/balance/verify.h"
#include "tests/balance/brute_force.h"
#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

using Kind = Certificate::Kind;

constexpr int kNumSolved = 300;
constexpr int kNumFuzzed = 400;
constexpr int kCertificatesEach = 60;

Instance drawn(int seed) {
  Random random(static_cast<std::uint64_t>(seed));
  return seed % 4 > 0 ? draw_model(random, 8, 6) : draw_small(random, 14, 4);
}

// Changes that leave nothing that proves a bound above 0, whatever the instance.
std::vector<Certificate> broken(const Certificate& sound, int num_shapes) {
  std::vector<Certificate> all;
  const auto add = [&](auto change) {
    Certificate& certificate = all.emplace_back(sound);
    change(&certificate);
  };
  add([](Certificate* c) { c->bound = -1; });
  add([](Certificate* c) { c->bound = kMaxTotalNs + 1; });
  if (sound.kind == Kind::kOneOwner) {
    add([](Certificate* c) { c->shape = ShapeIndex(-1); });
    add([&](Certificate* c) { c->shape = ShapeIndex(num_shapes); });
    add([](Certificate* c) { ++c->bound; });
  }
  if (sound.kind == Kind::kAllOwners) add([](Certificate* c) { ++c->bound; });
  if (sound.kind != Kind::kPatterns) return all;
  add([](Certificate* c) { c->cells = 0; });
  add([](Certificate* c) { c->cells = -c->cells; });
  add([](Certificate* c) { c->cells = 1 << 17; });
  add([](Certificate* c) { c->per_matrix.pop_back(); });
  add([](Certificate* c) { c->per_matrix.push_back(0); });
  add([](Certificate* c) { c->per_ns.pop_back(); });
  add([](Certificate* c) { c->per_ns.push_back(0); });
  add([](Certificate* c) {
    for (std::int64_t& price : c->per_matrix) price = 0;
    for (std::int64_t& price : c->per_ns) price = 0;
  });
  for (const ShapeIndex s : sound.per_matrix.indices()) {
    add([s](Certificate* c) { c->per_matrix[s] = -1; });
    add([s](Certificate* c) { c->per_ns[s] = -1; });
  }
  return all;
}

// The bound raised beyond an assignment that exists; and each price changed as well.
std::vector<Certificate> too_large(const Certificate& sound, Nanoseconds makespan) {
  std::vector<Certificate> all(3, sound);
  all[0].bound = makespan + 1;
  all[1].bound = makespan + makespan / 100 + 1;
  all[2].bound = 2 * makespan + 1;
  for (const ShapeIndex s : sound.per_matrix.indices()) {
    for (const std::int64_t factor : {0, 3}) {
      all.push_back(all[0]);
      all.back().per_matrix[s] *= factor;
      all.push_back(all[0]);
      all.back().per_ns[s] *= factor;
    }
  }
  return all;
}

TEST(Verify, AcceptsWhatSolveProvesAndNothingBroken) {
  std::map<Kind, int> num_proved;
  for (int seed = 0; seed < kNumSolved; ++seed) {
    const Instance instance = drawn(seed);
    const Problem problem(instance);
    const Solution solution = solve(problem);
    const Certificate& sound = solution.certificate;
    ASSERT_EQ(verify(instance, sound), "") << "seed " << seed;
    if (sound.bound == 0) continue;
    ++num_proved[sound.kind];
    for (const Certificate& certificate : broken(sound, instance.shapes.size())) {
      ASSERT_NE(verify(instance, certificate), "") << "seed " << seed;
    }
    for (const Certificate& certificate : too_large(sound, solution.assignment.makespan())) {
      ASSERT_NE(verify(instance, certificate), "") << "seed " << seed;
    }
  }
  EXPECT_GE(num_proved[Kind::kOneOwner], 5);
  EXPECT_GE(num_proved[Kind::kAllOwners], 50);
  EXPECT_GE(num_proved[Kind::kPatterns], 50);
}

// Each batch time lowered in turn: where the optimum falls below the bound, the proof must fail.
TEST(Verify, RefusesProofsOfSlowerBatches) {
  int num_refused = 0;
  for (int seed = 0; seed < kNumFuzzed; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const Instance instance = draw_small(random, 6, 3);
    const Certificate certificate = solve(Problem(instance)).certificate;
    for (const ShapeIndex s : instance.shapes.indices()) {
      for (std::size_t b = 0; b < instance.shapes[s].batches.size(); ++b) {
        Instance faster = instance;
        Nanoseconds& ns = faster.shapes[s].batches[b].ns;
        ns -= std::min<Nanoseconds>(ns, 1 + ns / 10);
        if (optimum(faster) >= certificate.bound) continue;
        ++num_refused;
        ASSERT_NE(verify(faster, certificate), "") << "seed " << seed << ", shape " << s;
      }
    }
  }
  EXPECT_GT(num_refused, kNumFuzzed / 4);
}

Certificate draw_certificate(Random& random, const Instance& instance, Nanoseconds least) {
  Certificate certificate;
  certificate.kind = static_cast<Kind>(draw(random, 0, 4) % 3);
  const auto near = static_cast<int>(std::min<Nanoseconds>(least / 4, 1 << 29));
  certificate.bound = std::max<Nanoseconds>(
      0, draw(random, 0, 1) == 0 ? least + draw(random, -1, 1) : least + draw(random, -near, near));
  certificate.shape = ShapeIndex(draw(random, -1, instance.shapes.size()));
  const int most_work = draw(random, 0, 1) * 3;
  for (int s = 0; s < instance.shapes.size(); ++s) {
    certificate.per_matrix.push_back(draw(random, 0, 9));
    certificate.per_ns.push_back(draw(random, 0, most_work));
  }
  const auto limit = static_cast<int>(std::min<Nanoseconds>(certificate.bound, 4096));
  certificate.cells = draw(random, 0, 2) == 0 ? draw(random, 0, limit) : limit - 1;
  return certificate;
}

// Prices such as solve() finds, for a bound it does not.
void raise_prices(Random& random, const Certificate& sound, Certificate* certificate) {
  certificate->kind = sound.kind;
  certificate->shape = sound.shape;
  certificate->per_matrix = sound.per_matrix;
  certificate->per_ns = sound.per_ns;
  for (const ShapeIndex s : sound.per_matrix.indices()) {
    certificate->per_matrix[s] += sound.per_matrix[s] / 16 * draw(random, -1, 1);
    certificate->per_ns[s] += sound.per_ns[s] / 16 * draw(random, -1, 1);
  }
}

TEST(Verify, NeverAcceptsMoreThanTheOptimum) {
  std::map<Kind, int> num_tight;
  for (int seed = 0; seed < kNumFuzzed; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const Instance instance = draw_small(random, 7, 3);
    const Nanoseconds least = optimum(instance);
    const Certificate sound = solve(Problem(instance)).certificate;
    for (int i = 0; i < kCertificatesEach; ++i) {
      Certificate certificate = draw_certificate(random, instance, least);
      if (i % 3 == 0) raise_prices(random, sound, &certificate);
      if (!verify(instance, certificate).empty()) continue;
      ASSERT_LE(certificate.bound, least) << "seed " << seed << ", certificate " << i;
      num_tight[certificate.kind] += certificate.bound == least && least > 0 ? 1 : 0;
    }
  }
  // Else the test would show nothing.
  EXPECT_GT(num_tight[Kind::kOneOwner], 20);
  EXPECT_GT(num_tight[Kind::kAllOwners], 20);
  EXPECT_GT(num_tight[Kind::kPatterns], 20);
}

}  // namespace
}  // namespace dmuon::balance
