#include "tests/watch/rank_threads.h"

#include <gtest/gtest.h>

#include <csignal>
#include <exception>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace dmuon::watch {

void run_ranks(int num_ranks, const std::function<void(int, const StorePtr&)>& body) {
  std::signal(SIGPIPE, SIG_IGN);  // as Python does: gloo may write to a rank that has gone
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> failures(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, store);
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::string& failure = failures[static_cast<std::size_t>(rank)];
    EXPECT_EQ(failure, "") << "rank " << rank;
  }
}

}  // namespace dmuon::watch
