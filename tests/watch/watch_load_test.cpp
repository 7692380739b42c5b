// What a Watch asks of the store.

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "dmuon/watch/watch.h"
#include "tests/watch/watches.h"

namespace dmuon::watch {
namespace {

using std::chrono::milliseconds;
using What = Rendezvous;

/// Requests of one kind.
struct Count {
  int requests = 0;
  std::size_t bytes = 0;  // of values, both ways
  bool operator==(const Count&) const = default;
};

/// A rank's connection to a store that ranks share; it counts.
class Counting : public c10d::PrefixStore {
 public:
  using Bytes = std::vector<std::uint8_t>;

  explicit Counting(StorePtr shared) : c10d::PrefixStore("counted", std::move(shared)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
  }

  void set(const std::string& key, const Bytes& value) override {
    count("set", value.size());
    c10d::PrefixStore::set(key, value);
  }
  Bytes get(const std::string& key) override {
    Bytes value = c10d::PrefixStore::get(key);
    count("get", value.size());
    return value;
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    count(value == 0 ? "read alarm" : "raise alarm", sizeof(value));
    return c10d::PrefixStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    count("check", keys.size());
    return c10d::PrefixStore::check(keys);
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    count("claim", expected.size() + desired.size());
    return c10d::PrefixStore::compareSet(key, expected, desired);
  }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    std::vector<Bytes> values = c10d::PrefixStore::multiGet(keys);
    std::size_t bytes = 0;
    for (const Bytes& value : values) bytes += value.size();
    count("read all", bytes);
    return values;
  }

  Count of(const std::string& kind) {
    const std::scoped_lock lock(mutex_);
    return counts_.contains(kind) ? counts_.at(kind) : Count();
  }

  int num_looks() { return of("read alarm").requests + of("raise alarm").requests; }

  std::map<std::string, Count> all_but_reading_the_alarm() {
    const std::scoped_lock lock(mutex_);
    std::map<std::string, Count> others = counts_;
    others.erase("read alarm");
    return others;
  }

 private:
  void count(const std::string& kind, std::size_t bytes) {
    const std::scoped_lock lock(mutex_);
    counts_[kind].requests += 1;
    counts_[kind].bytes += bytes;
  }

  std::mutex mutex_;
  std::map<std::string, Count> counts_;
};

using Stores = std::vector<c10::intrusive_ptr<Counting>>;

Stores counting_stores(std::size_t size) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  Stores stores;
  for (std::size_t i = 0; i < size; ++i) stores.push_back(c10::make_intrusive<Counting>(shared));
  return stores;
}

/// Until each rank has looked so often, does something.
void for_looks(int looks, const Stores& stores, const std::function<void()>& something) {
  std::vector<int> last;
  for (const auto& store : stores) last.push_back(store->num_looks() + looks);
  for (std::size_t rank = 0; rank < stores.size(); ++rank)
    while (stores[rank]->num_looks() < last[rank]) something();
}

void nap() { std::this_thread::sleep_for(milliseconds(1)); }

TEST(WatchLoad, IsASmallRequestALookWhileNoWaitIsLong) {
  constexpr milliseconds kLong(100);  // a hundred times as long as a wait
  const Stores stores = counting_stores(3);
  const auto ranks = watches({stores.begin(), stores.end()}, kLong);
  const auto begin = std::chrono::steady_clock::now();
  for_looks(5, stores, [&] {
    for (const auto& rank : ranks) {
      const std::int64_t number = rank->reach(What::kOperation, "publish of 'a'");
      const Watch::Waiting waiting(rank.get(), What::kOperation, number, "publish of 'a'");
      nap();
    }
  });
  const auto most_looks = (std::chrono::steady_clock::now() - begin) / kLong + 2;
  for (const auto& store : stores) {
    EXPECT_LE(store->num_looks(), most_looks);
    EXPECT_TRUE(store->all_but_reading_the_alarm().empty());
  }
}

class ManyRanks : public testing::Test {
 protected:
  static constexpr std::size_t kNumWaiting = 31;

  ManyRanks() {
    for (std::size_t rank = 0; rank < kNumWaiting; ++rank) {
      const std::int64_t number = ranks_[rank]->reach(What::kOperation, "publish of 'a'");
      waits_.push_back(std::make_unique<Watch::Waiting>(ranks_[rank].get(), What::kOperation,
                                                        number, "publish of 'a'"));
    }
  }

  Stores stores_ = counting_stores(kNumWaiting + 1);
  std::vector<std::unique_ptr<Watch>> ranks_ = watches({stores_.begin(), stores_.end()});
  std::vector<std::unique_ptr<Watch::Waiting>> waits_;  // for the last rank
};

// One that saves a checkpoint, say. Each alarm is diagnosed at once and when all have answered, or
// once for several; then all is quiet.
TEST_F(ManyRanks, ThatWaitForASlowOneReadLittleAndInTheEndNothing) {
  for_looks(5, stores_, nap);   // all have raised the alarm
  for_looks(10, stores_, nap);  // and all alarms have been diagnosed
  std::vector<std::map<std::string, Count>> before;
  for (const auto& store : stores_) before.push_back(store->all_but_reading_the_alarm());
  for_looks(20, stores_, nap);
  int num_tables = 0;
  for (std::size_t rank = 0; rank < stores_.size(); ++rank) {
    EXPECT_EQ(stores_[rank]->all_but_reading_the_alarm(), before[rank]) << "rank " << rank;
    EXPECT_EQ(stores_[rank]->of("raise alarm").requests, rank < kNumWaiting ? 1 : 0)
        << "rank " << rank;
    EXPECT_EQ(stores_[rank]->of("get").requests, 0) << "rank " << rank;
    const Count claims = stores_[rank]->of("claim");
    EXPECT_LE(claims.bytes, 40U * static_cast<std::size_t>(claims.requests)) << "rank " << rank;
    num_tables += stores_[rank]->of("read all").requests;
  }
  EXPECT_GT(num_tables, 0);
  EXPECT_LE(num_tables, static_cast<int>(2 * kNumWaiting));
  for (const auto& wait : waits_) EXPECT_NO_THROW(wait->check());
}

TEST_F(ManyRanks, AllReadTheDiagnosisOfOne) {
  ranks_.back()->over("it has had enough");
  int num_fetched = 0;
  for (std::size_t rank = 0; rank < kNumWaiting; ++rank) {
    waits_[rank].reset();
    const std::string why = wait_for(ranks_[rank].get(), What::kOperation, 1);
    EXPECT_TRUE(contains_all(why, {"rank 0 of the mesh has", "rank 31 ", "it has had enough"}))
        << "rank " << rank << ": " << why;
    num_fetched += stores_[rank]->of("get").requests;
  }
  EXPECT_GT(num_fetched, 0);
  EXPECT_LT(num_fetched, static_cast<int>(kNumWaiting));
}

}  // namespace
}  // namespace dmuon::watch
