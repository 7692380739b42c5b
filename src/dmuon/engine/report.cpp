#include "dmuon/engine/report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "dmuon/core/error.h"

namespace dmuon::engine {
namespace {

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

std::string line_of(const Report& report, std::size_t rank) {
  std::string text = core::message("rank ", rank, " of the mesh ");
  if (!report.over.empty()) return text + "is over: " + report.over;
  const std::int64_t issued = count(report, Rendezvous::kOperation);
  text += core::message("has issued ", issued, " operations");
  if (!report.issued.empty()) text += ", last " + report.issued.back().what;
  return text + (report.awaited ? ", and waits for " + report.where : ", and waits for nobody");
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

}  // namespace dmuon::engine
