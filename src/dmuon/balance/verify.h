#pragma once

#include <string>

#include "dmuon/balance/certificate.h"
#include "dmuon/balance/instance.h"

namespace dmuon::balance {

/// Checks that the certificate proves its bound for the instance. Uses whole numbers only, and no
/// code of the search: to trust a bound, read verify.cpp and certificate.h. Pure function.
/// @param instance valid.
/// @return empty if the certificate proves the bound, otherwise the error.
std::string verify(const Instance& instance, const Certificate& certificate);

}  // namespace dmuon::balance
