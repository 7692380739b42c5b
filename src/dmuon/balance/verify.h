#pragma once

#include <string>

#include "dmuon/balance/certificate.h"
#include "dmuon/balance/instance.h"

namespace dmuon::balance {

/// Whether the certificate proves its bound for the instance. Whole numbers only, and nothing of
/// the search is used: reading this file and certificate.h is enough to trust a bound.
/// @param instance valid.
/// @return empty if it does, else what is wrong.
std::string verify(const Instance& instance, const Certificate& certificate);

}  // namespace dmuon::balance
