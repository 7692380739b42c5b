#include "dmuon/watch/report.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iomanip>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <unordered_map>

#include "dmuon/core/error.h"
#include "dmuon/core/hash.h"

namespace dmuon::watch {
namespace {

constexpr std::size_t kMostNamed = 16;      // ranks, of a large mesh
constexpr std::size_t kMostOfReason = 160;  // bytes, in a table
constexpr std::size_t kHashDigits = 16;
constexpr core::EachOf<Rendezvous, kNumRendezvous> kRendezvous;
constexpr const char* kRendezvousNames[] = {"operation", "comparison", "agreement", "update"};

/// Two ranks that have issued different operations at one number.
struct Difference {
  std::int64_t number = std::numeric_limits<std::int64_t>::max();
  std::size_t first = 0;
  std::size_t second = 0;
};

/// Finds the lowest number at which any two ranks differ, and the lowest two ranks there. Compares
/// two ranks at the numbers that both remember.
std::optional<Difference> first_difference(const std::vector<Report>& reports) {
  struct First {
    std::uint64_t hash;
    std::size_t rank;
  };
  std::unordered_map<std::int64_t, First> issued;  // by number
  Difference found;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    std::int64_t number = reports[rank].reached[Rendezvous::kOperation] -
                          static_cast<std::int64_t>(reports[rank].hashes.size());
    for (const std::uint64_t hash : reports[rank].hashes) {
      const First& first = issued.try_emplace(++number, First{hash, rank}).first->second;
      if (first.hash != hash && number < found.number) found = {number, first.rank, rank};
    }
  }
  return found.second > 0 ? std::optional(found) : std::nullopt;
}

std::string issued_at(const Report& report, std::int64_t number) {
  const auto back = static_cast<std::size_t>(report.reached[Rendezvous::kOperation] - number);
  if (back >= report.words.size()) return core::message("operation ", number);
  return report.words[report.words.size() - 1 - back];
}

bool misses(const Report& waiting, const Report& other) {
  return waiting.awaited && other.reached[*waiting.awaited] < waiting.number;
}

// Returns at most so many bytes of a text. The result is UTF-8, as the text is.
std::string beginning(const std::string& text, std::size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0U) == 0x80U) --most;
  return text.substr(0, most) + "...";
}

std::string line_of(const Report& report, std::size_t rank,
                    std::size_t most_of_reason = std::string::npos) {
  std::string text = core::message("rank ", rank, " of the mesh ");
  text += core::message("has issued ", report.reached[Rendezvous::kOperation], " operations");
  if (!report.words.empty()) text += ", last " + report.words.back();
  if (!report.pass.empty()) text += ", is in " + report.pass;
  if (!report.over.empty())
    return text + ", and is over: " + beginning(report.over, most_of_reason);
  return text + (report.awaited ? ", and waits for " + report.where : ", and waits for nobody");
}

/// Returns, by rank, true if the rank is over or waits for a stuck rank. A rank that waits for no
/// stuck rank may still go on.
std::vector<bool> stuck_ranks(const std::vector<Report>& reports) {
  std::vector<bool> stuck;
  for (const Report& report : reports) stuck.push_back(report.awaited || !report.over.empty());
  for (bool changed = true; changed;) {
    changed = false;
    decltype(Report::reached) least{};  // numbers that all stuck ranks have come to
    std::ranges::fill(least, std::numeric_limits<std::int64_t>::max());
    for (std::size_t rank = 0; rank < reports.size(); ++rank) {
      for (const Rendezvous what : kRendezvous) {
        if (stuck[rank]) least[what] = std::min(least[what], reports[rank].reached[what]);
      }
    }
    for (std::size_t rank = 0; rank < reports.size(); ++rank) {
      const Report& report = reports[rank];
      if (!stuck[rank] || !report.over.empty()) continue;
      if (least[*report.awaited] < report.number) continue;
      stuck[rank] = false;
      changed = true;
    }
  }
  return stuck;
}

std::string passes_of(const std::vector<Report>& reports, std::size_t first, std::size_t second) {
  const std::string one = reports[first].pass;
  const std::string other = reports[second].pass;
  if (one == other) return {};
  const auto in = [](const std::string& pass) { return pass.empty() ? "no pass" : pass; };
  return core::message("; rank ", first, " is in ", in(one), ", rank ", second, " in ", in(other));
}

std::string age_of(const Report& report, std::int64_t now_ms) {
  const double age_s =
      static_cast<double>(std::max<std::int64_t>(now_ms - report.stored_ms, 0)) / 1e3;
  return core::message("told ", std::fixed, std::setprecision(1), age_s, " s ago");
}

std::string first_of(const std::vector<std::string>& all, const std::string& separator) {
  const std::size_t most = std::min(all.size(), kMostNamed);
  std::string text;
  for (std::size_t i = 0; i < most; ++i) text += (i == 0 ? "" : separator) + all[i];
  if (all.size() > most) text += core::message(separator, "and ", all.size() - most, " more");
  return text;
}

}  // namespace

void Report::issue(const std::string& what) {
  core::Hasher hasher;
  if (!hashes.empty()) hasher.add(static_cast<std::int64_t>(hashes.back()));
  hashes.push_back(hasher.add(what).value());
  if (hashes.size() > kMostHashes) hashes.pop_front();
  words.push_back(what);
  if (words.size() > kMostWords) words.pop_front();
  ++reached[Rendezvous::kOperation];
}

void Report::take_back_to(std::int64_t last) {
  std::int64_t& newest = reached[Rendezvous::kOperation];
  for (; newest > last; --newest) {
    if (!hashes.empty()) hashes.pop_back();
    if (!words.empty()) words.pop_back();
  }
}

std::string to_text(const Report& report) {
  std::string hashes;
  for (const std::uint64_t hash : report.hashes) {
    std::array<char, kHashDigits> digits{};
    const char* end = std::to_chars(digits.begin(), digits.end(), hash, 16).ptr;
    const auto size = static_cast<std::size_t>(end - digits.data());
    hashes.append(kHashDigits - size, '0').append(digits.data(), size);
  }
  return nlohmann::json{{"reached", report.reached.values},
                        {"awaited", report.awaited ? static_cast<int>(*report.awaited) : -1},
                        {"number", report.number},
                        {"where", report.where},
                        {"pass", report.pass},
                        {"over", report.over},
                        {"stored_ms", report.stored_ms},
                        {"hashes", hashes},
                        {"words", report.words}}
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Report report_from(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text);
  Report report;
  json.at("reached").get_to(report.reached.values);
  if (const int awaited = json.at("awaited"); awaited >= 0)
    report.awaited = static_cast<Rendezvous>(awaited);
  report.number = json.at("number");
  report.where = json.at("where");
  report.pass = json.at("pass");
  report.over = json.at("over");
  report.stored_ms = json.at("stored_ms");
  const std::string hashes = json.at("hashes");
  for (std::size_t at = 0; at < hashes.size(); at += kHashDigits)
    report.hashes.push_back(std::stoull(hashes.substr(at, kHashDigits), nullptr, 16));
  report.words = json.at("words");
  return report;
}

// Old reports give no false diagnosis:
//
// All ranks come to all rendezvous, of whatever kind, in one order. So each report has a position
// in one sequence, and a rank's position only grows. It takes operations back only when it is over.
//
// A rank that waits has come to the rendezvous that it waits for. So if it misses another rank, its
// report has the later position, whenever the two were stored.
//
// A stuck rank misses a stuck rank, that one a third, at ever earlier positions. So the last one is
// over, and its position is final. The ranks beyond it wait in vain.
//
// A circle is possible only if ranks have left the one order. No later report undoes that.
// Likewise, hashes at one number never change.
std::string in_vain(const std::vector<Report>& reports) {
  if (const std::optional<Difference> found = first_difference(reports)) {
    const std::string first = issued_at(reports[found->first], found->number);
    const std::string second = issued_at(reports[found->second], found->number);
    if (first == second)  // the words are forgotten, or the difference is older
      return core::message("rank ", found->first, " of the mesh has issued other operations than ",
                           "rank ", found->second, ", up to operation ", found->number);
    return core::message("rank ", found->first, " of the mesh has issued ", first, " where rank ",
                         found->second, " has issued ", second,
                         passes_of(reports, found->first, found->second));
  }
  const std::vector<bool> stuck = stuck_ranks(reports);
  // A rank whose update has failed is over, and may wait still. It is named if no other one waits.
  for (const bool over : {false, true}) {
    for (std::size_t rank = 0; rank < reports.size(); ++rank) {
      const Report& report = reports[rank];
      if (!report.awaited || !stuck[rank] || report.over.empty() == over) continue;
      for (std::size_t other = 0; other < reports.size(); ++other) {
        if (other == rank || !stuck[other] || !misses(report, reports[other])) continue;
        const std::string what = over ? "; it waits for " + report.where : "";
        return line_of(report, rank) + what + "; " + line_of(reports[other], other);
      }
    }
  }
  return {};
}

bool awaits_others(const std::vector<Report>& reports, std::size_t self) {
  return std::any_of(reports.begin(), reports.end(),
                     [&](const Report& other) { return misses(reports.at(self), other); });
}

std::string attendance(const std::vector<Report>& reports, std::size_t self, std::int64_t now_ms,
                       bool answered) {
  const Report& own = reports[self];
  const Rendezvous what = own.awaited.value_or(Rendezvous::kOperation);
  std::vector<std::size_t> ranks(reports.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::ranges::stable_sort(ranks, {}, [&](std::size_t rank) {
    return std::min(reports[rank].reached[what], own.number);
  });

  std::vector<std::string> absent;
  std::vector<std::string> lines;
  for (const std::size_t rank : ranks) {
    const Report& report = reports[rank];
    if (rank != self && misses(own, report))
      absent.push_back(core::message(absent.empty() ? "rank " : "", rank));
    if (rank == self) {
      lines.push_back(line_of(report, rank, kMostOfReason) + "; this rank");
    } else if (report.stored_ms == 0) {
      lines.push_back(core::message("rank ", rank, " of the mesh ",
                                    answered ? "has told nothing" : "may have told something"));
    } else {
      lines.push_back(line_of(report, rank, kMostOfReason) + "; " + age_of(report, now_ms));
    }
  }
  const std::string awaited = core::message(
      own.where, " (", kRendezvousNames[static_cast<int>(what)], " ", own.number, ")");
  const std::string who =
      !answered        ? "The store does not answer, so who has come to " + awaited + " is unknown"
      : absent.empty() ? "All ranks of the mesh have come to " + awaited
                       : "Not come to " + awaited + ": " + first_of(absent, ", ") + " of the mesh";
  return who + ". What ranks told last:\n  " + first_of(lines, "\n  ");
}

}  // namespace dmuon::watch
