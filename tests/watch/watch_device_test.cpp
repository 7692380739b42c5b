#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "dmuon/watch/watch.h"
#include "tests/watch/watches.h"

namespace dmuon::watch {
namespace {

using What = Rendezvous;

// A store whose host may end.
struct MortalStore : c10d::HashStore {
  std::atomic<bool> dead = false;

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    if (dead) throw std::runtime_error("Broken pipe");
    return HashStore::add(key, value);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    if (dead) throw std::runtime_error("Broken pipe");
    HashStore::set(key, value);
  }
};

// Two ranks of which the first has a device that is stuck in its first operation.
struct Ranks {
  StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::promise<std::string> promise;
  std::future<std::string> given_up = promise.get_future();
  Watch stuck{store, 0, 2, [](const std::string&) {}, kInterval};
  Watch other{store, 1, 2, [](const std::string&) {}, kInterval};

  explicit Ranks(std::chrono::milliseconds timeout = std::chrono::hours(1)) {
    stuck.look_at({[this](const std::string& why) { promise.set_value(why); },
                   [] {
                     return std::optional(Stuck{1, "publish of 'a'"});
                   },
                   timeout});
    stuck.reach(What::kOperation, "publish of 'a'");
    stuck.reach(What::kOperation, "route of 'b'");  // the host runs ahead
  }

  // Empty: not in time.
  std::string why(std::chrono::milliseconds most) {
    return given_up.wait_for(most) == std::future_status::ready ? given_up.get() : "";
  }
};

// The host is blocked outside of dmuon, or computes: it waits for nobody here.
TEST(WatchOfADevice, GivesUpWhatTheDeviceWaitsForInVain) {
  Ranks ranks;
  ranks.other.over("its program has ended");
  const std::string why = ranks.why(std::chrono::seconds(10));
  EXPECT_TRUE(contains_all(
      why, {"in vain",
            "rank 0 of the mesh has issued 2 operations, last route of 'b', and waits for "
            "publish of 'a', on its device",
            "rank 1 of the mesh has issued 0 operations, and is over: its program has ended"}))
      << why;
  EXPECT_TRUE(
      contains_all(why, {"\nNot come to publish of 'a', on its device (operation 1): rank 1"}))
      << why;
  EXPECT_THROW(ranks.stuck.leave("collectives of X"), core::CommError);
}

// The other rank's process is there, but its device never comes: no circle shows it.
TEST(WatchOfADevice, GivesUpWhatTheDeviceWaitsForLongerThanTheTimeout) {
  Ranks ranks(10 * kInterval);
  const std::string why = ranks.why(std::chrono::seconds(10));
  EXPECT_TRUE(contains_all(
      why, {"the device of rank 0 of the mesh has waited in publish of 'a', on its device "
            "(operation 1), for ",
            "the timeout of dedicate_params",
            "\nNot come to publish of 'a', on its device (operation 1): rank 1"}))
      << why;
  EXPECT_THROW(ranks.stuck.leave("collectives of X"), core::CommError);
}

// As where the rank that hosts the store has been killed.
TEST(WatchOfADevice, GivesUpAfterTheTimeoutWithoutAStore) {
  const auto store = c10::make_intrusive<MortalStore>();
  std::promise<std::string> promise;
  std::future<std::string> given_up = promise.get_future();
  Watch stuck{store, 0, 2, [](const std::string&) {}, kInterval};
  stuck.look_at({[&](const std::string& why) { promise.set_value(why); },
                 [] {
                   return std::optional(Stuck{1, "publish of 'a'"});
                 },
                 20 * kInterval});
  stuck.reach(What::kOperation, "publish of 'a'");
  store->dead = true;
  ASSERT_EQ(given_up.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  const std::string why = given_up.get();
  EXPECT_TRUE(contains_all(
      why, {"the device of rank 0 of the mesh has waited in publish of 'a'", "does not answer"}))
      << why;
  EXPECT_THROW(stuck.leave("collectives of X"), core::CommError);
}

// The host waits for a peer that is over, in a collective of the host framework's.
TEST(WatchOfAHost, GivesUpWhatItWaitsForInVainOutsideOfDmuon) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::promise<std::string> promise;
  std::future<std::string> given_up = promise.get_future();
  Watch waits{store, 0, 2, [](const std::string&) {}, kInterval};
  Watch other{store, 1, 2, [](const std::string&) {}, kInterval};
  waits.look_at({[&](const std::string& why) { promise.set_value(why); }});
  waits.leave("collectives of X");
  other.over("its update has failed");
  ASSERT_EQ(given_up.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  const std::string why = given_up.get();
  EXPECT_TRUE(contains_all(why, {"in vain", "waits for collectives of X",
                                 "rank 1 of the mesh has issued 0 operations, and is over: its "
                                 "update has failed",
                                 "\nNot come to collectives of X (operation 1): rank 1"}))
      << why;
  EXPECT_THROW(waits.leave("collectives of Y"), core::CommError);
}

}  // namespace
}  // namespace dmuon::watch
