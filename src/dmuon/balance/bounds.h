#pragma once

#include "dmuon/balance/certificate.h"
#include "dmuon/balance/owner_time.h"

namespace dmuon::balance {

/// The larger of two bounds that need no search; see Certificate::Kind for the arguments.
Certificate simple_bound(const Problem& problem);

}  // namespace dmuon::balance
