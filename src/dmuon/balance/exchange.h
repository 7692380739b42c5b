#pragma once

#include "dmuon/balance/assignment.h"

namespace dmuon::balance {

/// One owner gives matrices of a shape to another and takes some of another shape for them.
struct Exchange {
  int from = -1;
  int to = -1;
  int given = 0;  ///< shape
  int num_given = 0;
  int taken = 0;  ///< shape
  int num_taken = 0;
};

/// Whether the one that has more bytes afterwards stays within max_bytes.
bool fits(const Assignment& assignment, const Exchange& exchange);

void perform(Assignment& assignment, const Exchange& exchange);

}  // namespace dmuon::balance
