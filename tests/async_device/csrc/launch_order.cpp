#include "async_device/csrc/launch_order.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

#include "async_device/csrc/device.h"
#include "async_device/csrc/settings.h"

namespace async_device {
namespace {

constexpr size_t kMaxLaunches = 1000000;
constexpr auto kLook = std::chrono::milliseconds(200);

bool takes_part(const std::string& ranks, int rank) {
  return ranks.find("," + std::to_string(rank) + ",") != std::string::npos;
}

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string stall_key(int rank) { return "stalled/" + std::to_string(rank); }

}  // namespace

const std::string* interned_ranks(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text = ",";
  for (const int rank : ranks) text += std::to_string(rank) + ",";
  return interned(text);
}

LaunchOrder& LaunchOrder::get() {
  static auto* order = new LaunchOrder();
  return *order;
}

void LaunchOrder::connect(c10::intrusive_ptr<c10d::Store> store, int rank, int num_ranks) {
  const std::scoped_lock lock(mutex_);
  launches_.clear();
  store_ = std::move(store);
  rank_ = rank;
  num_ranks_ = num_ranks;
  num_checks_ = 0;
  if (std::exchange(is_watched_, true)) return;
  std::thread([this] { watch(); }).detach();
}

void LaunchOrder::add(const std::string* operation, const std::string* ranks) {
  const std::scoped_lock lock(mutex_);
  if (launches_.size() < kMaxLaunches) launches_.push_back({operation, ranks});
}

void LaunchOrder::publish(const std::string& key) {
  std::string text;
  for (const Launch& launch : launches_) text += *launch.ranks + " " + *launch.operation + "\n";
  store_->set(key, to_bytes(text));
}

/// @param is_final  whether nothing more will be launched by either: then one must not have more.
std::optional<std::string> LaunchOrder::compare(int other, const std::string& published,
                                                bool is_final) {
  std::vector<std::string> theirs, ours;
  std::istringstream lines(published);
  for (std::string ranks, operation; lines >> ranks && std::getline(lines >> std::ws, operation);) {
    if (takes_part(ranks, rank_)) theirs.push_back(operation);
  }
  for (const Launch& launch : launches_) {
    if (takes_part(*launch.ranks, other)) ours.push_back(*launch.operation);
  }
  const size_t count =
      is_final ? std::max(ours.size(), theirs.size()) : std::min(ours.size(), theirs.size());
  ours.resize(count, "nothing more");
  theirs.resize(count, "nothing more");
  const auto [mine, yours] = std::mismatch(ours.begin(), ours.end(), theirs.begin());
  if (mine == ours.end()) return std::nullopt;
  return "ranks " + std::to_string(rank_) + " and " + std::to_string(other) +
         " launch communication in different orders, so NCCL may wait for ever: number " +
         std::to_string(mine - ours.begin() + 1) + " of what they have in common is '" + *mine +
         "' on rank " + std::to_string(rank_) + " and '" + *yours + "' on rank " +
         std::to_string(other);
}

void LaunchOrder::check() {
  const WithoutGil without_gil;
  const std::scoped_lock lock(mutex_);
  if (store_ == nullptr) return;
  const std::string round = "check/" + std::to_string(num_checks_++) + "/";
  publish(round + std::to_string(rank_));
  for (int other = 0; other < num_ranks_; ++other) {
    const std::vector<uint8_t> bytes = store_->get(round + std::to_string(other));
    const auto mismatch = compare(other, {bytes.begin(), bytes.end()}, true);
    if (mismatch) raise(*mismatch);
  }
}

void LaunchOrder::watch() {
  while (true) {
    std::this_thread::sleep_for(kLook);
    if (Device::get().longest_communication_s() < settings().stall_s) continue;
    try {
      look_into_stall();
    } catch (const std::exception&) {  // the store is gone, and so is who could be told
    }
  }
}

void LaunchOrder::look_into_stall() {
  const std::scoped_lock lock(mutex_);
  publish(stall_key(rank_));
  for (int other = 0; other < num_ranks_; ++other) {
    if (other == rank_ || !store_->check({stall_key(other)})) continue;
    const std::vector<uint8_t> bytes = store_->get(stall_key(other));
    const auto mismatch = compare(other, {bytes.begin(), bytes.end()}, false);
    if (mismatch) Device::get().fail(*mismatch);
  }
}

}  // namespace async_device
