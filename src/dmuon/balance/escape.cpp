#include <algorithm>
#include <utility>
#include <vector>

#include "dmuon/balance/exchange.h"
#include "dmuon/balance/local_search.h"
#include "dmuon/balance/random.h"

namespace dmuon::balance {
namespace {

constexpr int kEscapeCells = 512;
constexpr int kPatience = 200;  // vain rounds of iterate, before it goes back to the best
constexpr int kRounds = 8;      // of anneal
constexpr int kEscapeAmounts[] = {1, 1, 2, 2, 3, 4, 4, 8, 16};

// The slowest owner and two or three others.
std::vector<int> drawn_owners(const Assignment& assignment, Random& random) {
  const int num_owners = assignment.problem().num_owners();
  const auto wanted = static_cast<std::size_t>(std::min(3 + random.below(2), num_owners));
  std::vector<int> owners = {assignment.slowest()};
  while (owners.size() < wanted) {
    const int owner = random.below(num_owners);
    if (std::find(owners.begin(), owners.end(), owner) == owners.end()) owners.push_back(owner);
  }
  return owners;
}

// What two of the owners have of a shape is divided at random, or goes to one of them.
void mix(Assignment& assignment, const std::vector<int>& owners, Random& random) {
  const auto draw = [&] {
    return owners[static_cast<std::size_t>(random.below(static_cast<int>(owners.size())))];
  };
  const int num_mixed = 1 + random.below(3);
  for (int i = 0; i < num_mixed; ++i) {
    const int shape = random.below(assignment.problem().num_shapes());
    const int a = draw();
    const int b = draw();
    if (a == b) continue;
    const int together = assignment.count(a, shape) + assignment.count(b, shape);
    const int part = random.below(together + 1);
    const int change = (random.below(3) == 0 ? together : part) - assignment.count(a, shape);
    if (!assignment.fits(a, shape, change) || !assignment.fits(b, shape, -change)) continue;
    assignment.add(a, shape, change);
    assignment.add(b, shape, -change);
  }
}

// Owners within 0.2 % of the makespan.
int num_slow(const Assignment& assignment, Nanoseconds makespan) {
  int sum = 0;
  for (const Nanoseconds load : assignment.loads()) sum += load > makespan - makespan / 500 ? 1 : 0;
  return sum;
}

// Whether a search goes on from `tried` instead of `current`; now and then from a worse one.
bool goes_on(const Assignment& tried, const Assignment& current, Nanoseconds best, Random& random) {
  const Nanoseconds old_makespan = current.makespan();
  const Nanoseconds new_makespan = tried.makespan();
  if (new_makespan != old_makespan) {
    return new_makespan < old_makespan ||
           (random.below(20) == 0 && new_makespan - best < best / 100);
  }
  return num_slow(tried, new_makespan) <= num_slow(current, old_makespan);
}

// Random exchanges, with what they would do to the excess over `limit` of all owners.
class RandomExchange {
 public:
  RandomExchange(Assignment& assignment, Nanoseconds limit) : all_(assignment), limit_(limit) {}

  /// @return whether there is anything to exchange between the owners drawn.
  bool draw(Random& random, bool from_slow) {
    const int num_owners = all_.problem().num_owners();
    const int num_shapes = all_.problem().num_shapes();
    int from = random.below(num_owners);
    for (int i = 0; from_slow && i < 4 && all_.load(from) <= limit_; ++i) {
      from = random.below(num_owners);
    }
    const int to = random.below(num_owners);
    if (from == to) return false;
    const int given = random.below(num_shapes);
    const int num_given = amount(random, all_.count(from, given));
    if (num_given == 0) return false;
    const int taken = random.below(3) == 0 ? given : random.below(num_shapes);
    const int num_taken = taken == given ? 0 : amount(random, all_.count(to, taken));
    drawn_ = {from, to, given, num_given, taken, num_taken};
    return fits(all_, drawn_);
  }

  Nanoseconds change() const {
    const auto& [from, to, given, num_given, taken, num_taken] = drawn_;
    Nanoseconds mine = all_.load_with(from, given, -num_given);
    Nanoseconds theirs = all_.load_with(to, given, num_given);
    if (num_taken > 0) {
      mine += all_.load_with(from, taken, num_taken) - all_.load(from);
      theirs += all_.load_with(to, taken, -num_taken) - all_.load(to);
    }
    return excess(mine) + excess(theirs) - excess(all_.load(from)) - excess(all_.load(to));
  }

  void perform() { balance::perform(all_, drawn_); }

  Nanoseconds excess(Nanoseconds load) const { return std::max<Nanoseconds>(0, load - limit_); }

 private:
  // Usually few; now and then all; none if there are fewer.
  static int amount(Random& random, int available) {
    if (available == 0) return 0;
    if (random.below(6) == 0) return available;
    const int few = kEscapeAmounts[random.below(std::size(kEscapeAmounts))];
    return few > available ? 0 : few;
  }

  Assignment& all_;
  Nanoseconds limit_;
  Exchange drawn_;
};

// Steps from `start` until nobody exceeds `limit`, or `num_steps` are done.
Assignment walk(const Assignment& start, Nanoseconds limit, Nanoseconds threshold,
                std::int64_t num_steps, Random& random) {
  Assignment assignment = start;
  RandomExchange exchange(assignment, limit);
  Nanoseconds excess = 0;
  for (const Nanoseconds load : assignment.loads()) excess += exchange.excess(load);
  for (std::int64_t i = 0; i < num_steps && excess > 0; ++i) {
    const auto left = static_cast<Nanoseconds>(Wide{threshold} * (num_steps - i) / num_steps);
    if (!exchange.draw(random, i % 2 == 1)) continue;
    const Nanoseconds change = exchange.change();
    // Mostly far less than the threshold.
    const auto drawn = static_cast<Nanoseconds>(random() % static_cast<std::uint64_t>(left + 1));
    if (change > 0 && change > static_cast<Nanoseconds>(Wide{drawn} * random.below(256) / 256)) {
      continue;
    }
    exchange.perform();
    excess += change;
  }
  return assignment;
}

}  // namespace

void iterate(Assignment& assignment, Nanoseconds target, int max_pairs, std::uint64_t seed) {
  Random random(12345 + seed);
  Assignment current = assignment;
  int num_pairs = 0;
  int num_vain = 0;
  while (num_pairs < max_pairs && assignment.makespan() > target) {
    Assignment tried = current;
    const std::vector<int> owners = drawn_owners(tried, random);
    mix(tried, owners, random);
    for (int round = 0; round < 3; ++round) {
      for (std::size_t i = 0; i < owners.size(); ++i) {
        for (std::size_t j = i + 1; j < owners.size(); ++j, ++num_pairs) {
          divide_pair(tried, owners[i], owners[j], kEscapeCells);
        }
      }
    }
    num_pairs += 1 + divide_pairs(tried, target, 20, 12);
    if (goes_on(tried, current, assignment.makespan(), random)) current = std::move(tried);
    if (current.makespan() < assignment.makespan()) {
      assignment = current;
      num_vain = 0;
    } else if (++num_vain % kPatience == 0) {
      current = assignment;
    }
  }
}

void anneal(Assignment& assignment, Nanoseconds target, std::int64_t num_steps,
            std::uint64_t seed) {
  if (assignment.problem().num_owners() < 2) return;
  Random random(77 + seed);
  for (int round = 0; round < kRounds && assignment.makespan() > target; ++round) {
    const Nanoseconds makespan = assignment.makespan();
    const Nanoseconds step =
        std::max<Nanoseconds>(1, makespan / (round < kRounds / 2 ? 500 : 1000));
    const Nanoseconds limit = std::max(target, makespan - step);
    const Nanoseconds threshold = limit / (round % 2 == 1 ? 10 : 50);
    Assignment tried = walk(assignment, limit, threshold, num_steps / kRounds, random);
    divide_pairs(tried, target, 50, 30);
    if (tried.makespan() < assignment.makespan()) assignment = std::move(tried);
  }
}

}  // namespace dmuon::balance
