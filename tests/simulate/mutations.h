#pragma once

#include <vector>

#include "dmuon/simulate/program.h"
#include "tests/simulate/random_job.h"

namespace dmuon::simulate {

/// A way to make sound programs unsound. None of them may leave the programs as good as they were:
/// where a change would not matter, they do not make it.
struct Mutator {
  const char* name;
  const char* finding;  ///< part of a violation that must be reported
  /// @return false if there is no place for it; then the programs are as they were.
  bool (*apply)(Random* random, const Job& job, Programs* programs);
};

/// All of them.
const std::vector<Mutator>& mutators();

// Parts of mutators().
std::vector<Mutator> order_mutators();     ///< of messages and dependencies, whatever they carry
std::vector<Mutator> weight_mutators();    ///< of publications, waits for them, and reshards
std::vector<Mutator> gradient_mutators();  ///< of routes
std::vector<Mutator> update_mutators();    ///< of batches, and of publications beside them

}  // namespace dmuon::simulate
