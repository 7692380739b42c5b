#include "dmuon/engine/report.h"

#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <numeric>

#include "dmuon/core/error.h"

namespace dmuon::engine {
namespace {

constexpr std::size_t kMostNamed = 16;     // ranks, of a large mesh
constexpr std::size_t kMostOfReason = 60;  // bytes, in a table
constexpr const char* kRendezvousNames[] = {"operation", "comparison", "agreement"};

std::int64_t count(const Report& report, Rendezvous what) {
  return report.reached[static_cast<std::size_t>(what)];
}

/// The first number, of those that both remember, at which the two have issued something else.
std::optional<std::int64_t> first_difference(const Report& a, const Report& b) {
  const auto first = [](const Report& of) {
    return count(of, Rendezvous::kOperation) - static_cast<std::int64_t>(of.issued.size()) + 1;
  };
  const std::int64_t last =
      std::min(count(a, Rendezvous::kOperation), count(b, Rendezvous::kOperation));
  for (std::int64_t number = std::max(first(a), first(b)); number <= last; ++number) {
    if (a.issued[static_cast<std::size_t>(number - first(a))].hash !=
        b.issued[static_cast<std::size_t>(number - first(b))].hash)
      return number;
  }
  return std::nullopt;
}

std::string issued_at(const Report& report, std::int64_t number) {
  const std::int64_t back = count(report, Rendezvous::kOperation) - number;
  return report.issued[report.issued.size() - 1 - static_cast<std::size_t>(back)].what;
}

bool misses(const Report& waiting, const Report& other) {
  return waiting.awaited && count(other, *waiting.awaited) < waiting.number;
}

// At most so many bytes of the text, which is UTF-8 and stays so.
std::string beginning(const std::string& text, std::size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0U) == 0x80U) --most;
  return text.substr(0, most) + "...";
}

std::string line_of(const Report& report, std::size_t rank,
                    std::size_t most_of_reason = std::string::npos) {
  std::string text = core::message("rank ", rank, " of the mesh ");
  const std::int64_t issued = count(report, Rendezvous::kOperation);
  text += core::message("has issued ", issued, " operations");
  if (!report.issued.empty()) text += ", last " + report.issued.back().what;
  if (!report.over.empty())
    return text + ", and is over: " + beginning(report.over, most_of_reason);
  return text + (report.awaited ? ", and waits for " + report.where : ", and waits for nobody");
}

std::string age_of(const Report& report, std::int64_t now_ms) {
  const double age_s =
      static_cast<double>(std::max<std::int64_t>(now_ms - report.told_ms, 0)) / 1e3;
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

std::string to_text(const Report& report) {
  nlohmann::json issued = nlohmann::json::array();
  for (const Report::Issued& one : report.issued) issued.push_back({one.hash, one.what});
  return nlohmann::json{{"reached", report.reached},
                        {"awaited", report.awaited ? static_cast<int>(*report.awaited) : -1},
                        {"number", report.number},
                        {"where", report.where},
                        {"over", report.over},
                        {"told_ms", report.told_ms},
                        {"issued", issued}}
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Report report_from(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text);
  Report report;
  for (std::size_t i = 0; i < kNumRendezvous; ++i) report.reached[i] = json.at("reached").at(i);
  if (const int awaited = json.at("awaited"); awaited >= 0)
    report.awaited = static_cast<Rendezvous>(awaited);
  report.number = json.at("number");
  report.where = json.at("where");
  report.over = json.at("over");
  report.told_ms = json.at("told_ms");
  for (const nlohmann::json& one : json.at("issued"))
    report.issued.push_back({one.at(0), one.at(1)});
  return report;
}

std::string in_vain(const std::vector<Report>& reports, std::size_t self) {
  const Report& own = reports[self];
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    if (const auto number = first_difference(own, reports[rank])) {
      return core::message("rank ", self, " of the mesh has issued ", issued_at(own, *number),
                           " where rank ", rank, " has issued ", issued_at(reports[rank], *number));
    }
  }
  // Of those that wait, who does not wait for one of them may still come on.
  std::vector<bool> stuck;
  for (const Report& report : reports) stuck.push_back(report.awaited || !report.over.empty());
  const auto waits_for_a_stuck_one = [&](std::size_t rank) {
    for (std::size_t other = 0; other < reports.size(); ++other) {
      if (stuck[other] && misses(reports[rank], reports[other])) return true;
    }
    return false;
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t rank = 0; rank < reports.size(); ++rank) {
      if (!stuck[rank] || !reports[rank].over.empty() || waits_for_a_stuck_one(rank)) continue;
      stuck[rank] = false;
      changed = true;
    }
  }
  if (!stuck[self]) return {};
  for (std::size_t other = 0; other < reports.size(); ++other) {
    if (stuck[other] && misses(own, reports[other]))
      return line_of(own, self) + "; " + line_of(reports[other], other);
  }
  return {};
}

std::string attendance(const std::vector<Report>& reports, std::size_t self, std::int64_t now_ms) {
  const Report& own = reports[self];
  const Rendezvous what = own.awaited.value_or(Rendezvous::kOperation);
  std::vector<std::size_t> ranks(reports.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::ranges::stable_sort(ranks, {}, [&](std::size_t rank) {
    return std::min(count(reports[rank], what), own.number);
  });

  std::vector<std::string> absent;
  std::vector<std::string> lines;
  for (const std::size_t rank : ranks) {
    const Report& report = reports[rank];
    if (misses(own, report)) absent.push_back(core::message(absent.empty() ? "rank " : "", rank));
    if (rank == self) {
      lines.push_back(line_of(report, rank, kMostOfReason) + "; this rank");
    } else if (report.told_ms == 0) {
      lines.push_back(core::message("rank ", rank, " of the mesh has told nothing"));
    } else {
      lines.push_back(line_of(report, rank, kMostOfReason) + "; " + age_of(report, now_ms));
    }
  }
  const std::string awaited = core::message(
      own.where, " (", kRendezvousNames[static_cast<int>(what)], " ", own.number, ")");
  const std::string who =
      absent.empty() ? "All ranks of the mesh have come to " + awaited
                     : "Not come to " + awaited + ": " + first_of(absent, ", ") + " of the mesh";
  return who + ". What ranks told last:\n  " + first_of(lines, "\n  ");
}

}  // namespace dmuon::engine
