#include "tests/balance/random_instance.h"

namespace dmuon::balance {
namespace {

enum class Times { kUnrelated, kSaving, kEqual, kZero, kLong };

Nanoseconds draw_time(Random& random, Times times, int size) {
  switch (times) {
    case Times::kUnrelated:
      return draw(random, 0, 40);
    case Times::kSaving:
      return 1000 + size * draw(random, 300, 1000);
    case Times::kEqual:
      return 7;
    case Times::kZero:
      return 0;
    case Times::kLong:
      return (Nanoseconds{1} << 40) + draw(random, 0, 1 << 30);
  }
  return 0;
}

Times draw_times(Random& random) {
  constexpr Times kOften[] = {Times::kUnrelated, Times::kUnrelated, Times::kUnrelated,
                              Times::kSaving,    Times::kSaving,    Times::kSaving,
                              Times::kEqual,     Times::kZero,      Times::kLong};
  return kOften[draw(random, 0, 8)];
}

CostedShape shape_of(Random& random, int num_matrices, Times times) {
  CostedShape shape;
  shape.num_matrices = num_matrices;
  shape.bytes = draw(random, 0, 9);
  for (int size = 1; size <= 8; ++size) {
    if (size > 1 && draw(random, 0, 2) == 0) continue;
    shape.batches.push_back({size, draw_time(random, times, size)});
  }
  return shape;
}

}  // namespace

CostedShape draw_shape(Random& random, int num_matrices) {
  return shape_of(random, num_matrices, draw_times(random));
}

Instance draw_small(Random& random, int max_matrices, int max_owners) {
  Instance instance;
  instance.num_owners = draw(random, 1, max_owners);
  int left = draw(random, 0, max_matrices);
  const int num_shapes = draw(random, 0, 4);
  const Times times = draw_times(random);
  const bool mixed = draw(random, 0, 3) == 0;
  for (int s = 0; s < num_shapes; ++s) {
    const int num_matrices = draw(random, 0, left);
    left -= num_matrices;
    instance.shapes.push_back(shape_of(random, num_matrices, mixed ? draw_times(random) : times));
  }
  return instance;
}

Instance draw_model(Random& random, int most_each, int max_owners) {
  Instance instance;
  instance.num_owners = draw(random, 2, max_owners);
  const int num_shapes = draw(random, 2, 5);
  for (int s = 0; s < num_shapes; ++s) {
    CostedShape& shape = instance.shapes.emplace_back();
    shape.num_matrices = draw(random, 1, most_each);
    shape.bytes = draw(random, 1, 1000);
    // A launch, and matrices that take less the more of them there are.
    const Nanoseconds launch = draw(random, 0, 200'000);
    const Nanoseconds each = draw(random, 50'000, 3'000'000);
    const int saving = draw(random, 0, 15);
    Nanoseconds factor = 100;
    for (int size = 1; size <= 16; size *= 2, factor -= saving) {
      const Nanoseconds noise = draw(random, 980, 1020);
      shape.batches.push_back({size, launch + size * each / 100'000 * factor * noise});
    }
  }
  return instance;
}

}  // namespace dmuon::balance
