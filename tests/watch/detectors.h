#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <utility>

#include "dmuon/watch/detector.h"
#include "tests/watch/reports.h"

namespace dmuon::watch {

using Words = std::vector<std::string>;

inline constexpr std::chrono::milliseconds kLook(500);
inline constexpr std::int64_t kPublished = 1000;
/// A rank, and what it knows of claims. `device` is asked if there is one.
struct DetectingRank {
  DetectingRank(std::size_t number, std::size_t size)
      : detector(number, size, std::chrono::milliseconds(10'000)) {}

  Detector detector;
  std::function<std::optional<Stuck>()> device;
  std::int64_t known_claim = 0;
  std::int64_t diagnosed = 0;
  std::string does;  // in its last interval
  Words warnings;
  int times_given_up = 0;
  bool dead = false;
};

/// Intervals of all ranks, one after the other, over a store that is plain data.
class DetectorTest : public testing::Test {
 protected:
  // Ranks, which have stored that they have begun.
  void make(std::size_t size) {
    reports_.resize(size);
    for (std::size_t rank = 0; rank < size; ++rank) ranks_.emplace_back(rank, size);
  }

  Detector& rank(std::size_t number) { return ranks_[number].detector; }

  // Reaches a rendezvous and waits there.
  void wait(std::size_t number, Rendezvous what, const std::string& described) {
    const std::int64_t reached = rank(number).reach(what, described, now_);
    rank(number).begin_wait(what, reached, described, now_);
  }

  // As Watch does it, up to its claim. Returns true if the claim was granted.
  bool begin(std::size_t number) {
    DetectingRank& rank = ranks_[number];
    Detector& detector = rank.detector;
    if (detector.begin_interval(rank.device != nullptr)) detector.see_device(rank.device(), now_);
    const bool raises = detector.raises_alarm(now_);
    rank.does = raises ? "stores its report, raises the alarm" : "reads the alarm";
    if (raises) {
      reports_[number] = detector.report(1);
      ++alarm_;
    }
    const Detector::Next next = detector.see_alarm(alarm_, alarm_ >= kPublished, rank.diagnosed);
    if (next.stores_report) {
      rank.does += ", stores its report";
      reports_[number] = detector.report(1);
    }
    if (next.reads_diagnosis) {
      rank.does += ", reads the diagnosis";
      diagnosis_ = published_;
    }
    if (!next.claims) return false;
    rank.does += ", claims";
    const bool granted = rank.known_claim == claim_;
    if (granted) {
      ++claim_;
      diagnosed_ = std::max(next.answered, rank.diagnosed);
    }
    rank.known_claim = claim_;
    rank.diagnosed = diagnosed_;
    return granted;
  }

  void finish(std::size_t number, bool granted) {
    DetectingRank& rank = ranks_[number];
    std::vector<Report> reports;
    if (granted) {
      rank.does += ", reads all";
      reports = reports_;
      diagnosis_ = in_vain(reports);
      if (!diagnosis_.empty()) {
        rank.does += ", publishes";
        published_ = diagnosis_;
        alarm_ += kPublished;
      }
    }
    const Detector::Conclusion result =
        rank.detector.conclude(reports, std::exchange(diagnosis_, ""), now_, 1);
    if (!result.warning.empty()) rank.warnings.push_back(result.warning);
    rank.times_given_up += result.gives_up ? 1 : 0;
  }

  // Returns what each rank does in one interval.
  Words interval() {
    Words all;
    now_ += kLook;
    for (std::size_t number = 0; number < ranks_.size(); ++number) {
      if (!ranks_[number].dead) finish(number, begin(number));
      all.push_back(ranks_[number].dead ? "" : ranks_[number].does);
    }
    return all;
  }

  void intervals(int times) {
    for (int i = 0; i < times; ++i) interval();
  }

  std::deque<DetectingRank> ranks_;
  Detector::Time now_;
  // The store.
  std::vector<Report> reports_;
  std::int64_t alarm_ = 0;
  std::int64_t claim_ = 0;
  std::int64_t diagnosed_ = 0;
  std::string published_;

 private:
  std::string diagnosis_;  // read or made in this interval
};

}  // namespace dmuon::watch
