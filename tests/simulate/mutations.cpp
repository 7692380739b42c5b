#include "tests/simulate/mutations.h"

namespace dmuon::simulate {

const std::vector<Mutator>& mutators() {
  static const std::vector<Mutator> kMutators = [] {
    std::vector<Mutator> all = order_mutators();
    for (const auto& part : {weight_mutators(), gradient_mutators(), update_mutators()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return kMutators;
}

}  // namespace dmuon::simulate
