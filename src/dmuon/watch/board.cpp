#include "dmuon/watch/board.h"

#include <algorithm>

#include "dmuon/core/error.h"

namespace dmuon::watch {
namespace {

// Beside the reports, "dmuon watch <rank>".
const std::string kBell = "dmuon watch bell";
const std::string kClaim = "dmuon watch judge";
const std::string kVerdict = "dmuon watch verdict";

}  // namespace

Board::Board(const c10::intrusive_ptr<c10d::Store>& store, std::size_t rank, std::size_t size)
    : store_(store->clone()), rank_(rank), told_(size) {
  for (std::size_t of = 0; of < size; ++of) keys_.push_back(core::message("dmuon watch ", of));
}

void Board::tell(const Report& own) { store_->set(keys_[rank_], to_text(own)); }

std::int64_t Board::bell(bool ring) { return store_->add(kBell, ring ? 1 : 0); }

// A claim takes the place of the one before, if the claimant knows that one: who comes second
// learns of the first instead. No two claims are alike: a rank that claims again has heard a ring,
// or more answers, since.
bool Board::claim(std::int64_t answered, std::int64_t shown) {
  const std::string own = std::to_string(std::max(answered, judged_)) + " " +
                          std::to_string(shown) + " " + std::to_string(rank_);
  claim_ = store_->compareSet(kClaim, claim_, own);
  judged_ = std::stoll(claim_);
  return claim_ == own;
}

std::vector<Report> Board::reports() {
  // To get what is not there would wait for it.
  const bool all = std::ranges::find(told_, false) == told_.end() || store_->check(keys_);
  std::vector<std::size_t> ranks;
  std::vector<std::string> keys;
  for (std::size_t rank = 0; rank < keys_.size(); ++rank) {
    told_[rank] = told_[rank] || all || store_->check({keys_[rank]});
    if (!told_[rank]) continue;
    ranks.push_back(rank);
    keys.push_back(keys_[rank]);
  }
  const std::vector<std::vector<std::uint8_t>> texts = store_->multiGet(keys);
  std::vector<Report> reports(keys_.size());
  for (std::size_t i = 0; i < ranks.size(); ++i)
    reports[ranks[i]] = report_from({texts[i].begin(), texts[i].end()});
  return reports;
}

void Board::publish(const std::string& verdict) {
  store_->set(kVerdict, verdict);
  store_->add(kBell, kPublished);
}

std::string Board::verdict() { return store_->get_to_str(kVerdict); }

}  // namespace dmuon::watch
