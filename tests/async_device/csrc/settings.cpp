#include "async_device/csrc/settings.h"

#include <c10/util/Exception.h>

#include <cstdlib>

namespace async_device {
namespace {

const char* order_name(Order order) {
  switch (order) {
    case Order::kComputeFirst:
      return "compute_first";
    case Order::kSideFirst:
      return "side_first";
    case Order::kRandom:
      return "random";
    case Order::kIssueOrder:
      return "issue_order";
  }
  return "";
}

}  // namespace

Settings& settings() {
  static Settings settings;
  return settings;
}

std::string repeat_note() {
  const char* rank = std::getenv("RANK");
  return std::string(" [repeat: ASYNC_DEVICE_ORDER=") + order_name(settings().order) +
         " ASYNC_DEVICE_SEED=" + std::to_string(settings().seed) + ", rank " +
         (rank == nullptr ? "0" : rank) + "]";
}

void raise(const std::string& message) {
  TORCH_CHECK(false, "async_device: ", message, repeat_note());
}

}  // namespace async_device
