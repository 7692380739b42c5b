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

const std::vector<Mutator>& mutators();

}  // namespace dmuon::simulate
