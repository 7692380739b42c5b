#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dmuon/core/error.h"
#include "dmuon/watch/watch.h"
#include "tests/watch/rank_threads.h"

namespace dmuon::watch {

inline constexpr std::chrono::milliseconds kInterval(20);

/// Watches of several ranks, in one thread; each with its connection to their store.
inline std::vector<std::unique_ptr<Watch>> watches(const std::vector<StorePtr>& stores,
                                                   std::chrono::milliseconds interval = kInterval) {
  const auto size = static_cast<int>(stores.size());
  std::vector<std::unique_ptr<Watch>> all;
  for (int rank = 0; rank < size; ++rank) {
    all.push_back(std::make_unique<Watch>(
        stores[static_cast<std::size_t>(rank)], rank, size, [](const std::string&) {}, interval));
  }
  return all;
}

/// What a rank does until it is told that it waits in vain, or ten seconds have passed.
inline std::string wait_for(Watch* watch, Rendezvous what, std::int64_t number) {
  const Watch::Waiting waiting(watch, what, number, "number " + std::to_string(number));
  for (int i = 0; i < 1000; ++i) {
    try {
      waiting.check();
    } catch (const core::CommError& error) {
      return error.what();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return "";
}

inline bool contains_all(const std::string& text, const std::vector<std::string>& parts) {
  return std::ranges::all_of(
      parts, [&](const std::string& part) { return text.find(part) != std::string::npos; });
}

}  // namespace dmuon::watch
