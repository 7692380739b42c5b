#pragma once

#include <vector>

#include "dmuon/simulate/execution.h"

namespace dmuon::simulate {

/// A message as its first member has described it, and who has come to it.
class Collective {
 public:
  Collective(const schedule::Operation& operation, const schedule::Message& message, int size)
      : kind_(operation.kind),
        subject_(operation.subject),
        message_(message),
        has_come_(static_cast<std::size_t>(size), false) {}

  bool fits(const schedule::Operation& operation, const schedule::Message& message) const {
    return operation.kind == kind_ && operation.subject == subject_ && message == message_;
  }
  void add(int member, const Arrival& arrival) {
    has_come_.at(static_cast<std::size_t>(member)) = true;
    ++num_come_;
    if (member == message_.root) root_ = arrival;
    if (arrival.at_us > last_.at_us) last_ = arrival;
  }

  schedule::Kind kind() const { return kind_; }
  const schedule::Subject& subject() const { return subject_; }
  const schedule::Message& message() const { return message_; }
  int size() const { return static_cast<int>(has_come_.size()); }
  int num_come() const { return num_come_; }
  bool has_come(int member) const { return has_come_.at(static_cast<std::size_t>(member)); }
  bool is_complete() const { return num_come_ == size(); }
  /// The latest arrival. Call it if is_complete().
  const Arrival& last() const { return last_; }
  /// The root's. Call it if the root has come.
  const Arrival& root() const { return root_; }

 private:
  schedule::Kind kind_;
  schedule::Subject subject_;
  schedule::Message message_;
  std::vector<bool> has_come_;  // [members]
  int num_come_ = 0;
  Arrival root_;
  Arrival last_;
};

}  // namespace dmuon::simulate
