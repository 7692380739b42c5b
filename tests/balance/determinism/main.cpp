// Prints what solve() answers, to be compared between compilers' options.

#include <cstdio>

#include "dmuon/balance/solve.h"
#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

// As in models: a launch, then batches that gain up to a third. Integers only, so that the instance
// itself is the same everywhere.
Instance model(std::initializer_list<std::pair<int, Nanoseconds>> shapes, int num_owners) {
  Instance instance;
  instance.num_owners = num_owners;
  for (const auto& [num_matrices, each] : shapes) {
    CostedShape& shape = instance.shapes.emplace_back();
    shape.num_matrices = num_matrices;
    for (int size = 1, percent = 100; size <= 16; size *= 2, percent -= 8) {
      shape.batches.push_back({size, 150'000 + size * each / 100 * percent});
    }
  }
  return instance;
}

template <typename Values>
void print(const char* name, const Values& values) {
  std::printf(" %s", name);
  for (const std::int64_t value : values) std::printf(" %lld", static_cast<long long>(value));
  std::printf("\n");
}

void print_solution(const Instance& instance) {
  const Problem problem(instance);
  const Solution solution = solve(problem);
  std::printf("%d owners, %d shapes\n", problem.num_owners(),
              static_cast<int>(instance.shapes.size()));
  for (const ShapeIndex s : problem.shapes()) {
    std::vector<std::int64_t> counts;
    for (const Owner owner : problem.owners()) {
      counts.push_back(solution.assignment.count(owner, s));
    }
    print("counts", counts);
  }
  const Certificate& certificate = solution.certificate;
  print("loads", solution.assignment.loads());
  print("kind, bound, shape, cells",
        std::vector<std::int64_t>{static_cast<std::int64_t>(certificate.kind), certificate.bound,
                                  certificate.shape.value(), certificate.cells});
  print("per_matrix", certificate.per_matrix);
  print("per_ns", certificate.per_ns);
}

}  // namespace
}  // namespace dmuon::balance

int main() {
  using namespace dmuon::balance;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    Random random(seed);
    print_solution(draw_small(random, 30, 6));
  }
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    Random random(seed);
    print_solution(draw_model(random, 80, 24));
  }
  // qwen2.5-7b, pi0 and qwen2.5-vl-3b, nearly.
  print_solution(model({{84, 4'570'207}, {56, 2'005'189}, {56, 167'102}}, 16));
  print_solution(
      model({{108, 152'345}, {54, 210'987}, {36, 433'210}, {36, 61'234}, {54, 1'234'567}}, 32));
  print_solution(
      model({{32, 333'333}, {32, 177'777}, {96, 301'234}, {72, 444'444}, {108, 987'654}}, 64));
  return 0;
}
