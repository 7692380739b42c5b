#include "dmuon/watch/board.h"

#include <algorithm>

#include "dmuon/core/error.h"

namespace dmuon::watch {
namespace {

// Keys; those of the reports are "dmuon watch <rank>".
const std::string kAlarm = "dmuon watch alarm";
const std::string kClaim = "dmuon watch claim";
const std::string kDiagnosis = "dmuon watch diagnosis";

}  // namespace

Board::Board(const c10::intrusive_ptr<c10d::Store>& store, std::size_t rank, std::size_t size)
    : store_(store->clone()), rank_(rank), stored_(size) {
  for (std::size_t of = 0; of < size; ++of) keys_.push_back(core::message("dmuon watch ", of));
}

void Board::store(const Report& own) { store_->set(keys_[rank_], to_text(own)); }

std::int64_t Board::alarm(bool raise) { return store_->add(kAlarm, raise ? 1 : 0); }

// A claim replaces the newest one only if the claimant knows that one. No two claims are equal: a
// rank that claims again has seen another alarm, or more answers, since.
bool Board::claim(std::int64_t answered, std::int64_t alarm) {
  const std::string own = std::to_string(std::max(answered, diagnosed_)) + " " +
                          std::to_string(alarm) + " " + std::to_string(rank_);
  claim_ = store_->compareSet(kClaim, claim_, own);
  diagnosed_ = std::stoll(claim_);
  return claim_ == own;
}

std::vector<Report> Board::reports() {
  // multiGet would wait for a missing key.
  const bool all = std::ranges::find(stored_, false) == stored_.end() || store_->check(keys_);
  std::vector<std::size_t> ranks;
  std::vector<std::string> keys;
  for (std::size_t rank = 0; rank < keys_.size(); ++rank) {
    stored_[rank] = stored_[rank] || all || store_->check({keys_[rank]});
    if (!stored_[rank]) continue;
    ranks.push_back(rank);
    keys.push_back(keys_[rank]);
  }
  const std::vector<std::vector<std::uint8_t>> texts = store_->multiGet(keys);
  std::vector<Report> reports(keys_.size());
  for (std::size_t i = 0; i < ranks.size(); ++i)
    reports[ranks[i]] = report_from({texts[i].begin(), texts[i].end()});
  return reports;
}

void Board::publish(const std::string& diagnosis) {
  store_->set(kDiagnosis, diagnosis);
  store_->add(kAlarm, kPublished);
}

std::string Board::diagnosis() { return store_->get_to_str(kDiagnosis); }

}  // namespace dmuon::watch
