#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/schedule/resolver.h"
#include "tests/schedule/three_units.h"

namespace dmuon::schedule {

using core::UnitIndex;

inline const UnitIndex kA(0), kB(1), kC(2);

/// Writes down what it is told, and throws where it is asked to.
class Recorder : public Performer {
 public:
  void compare(const std::optional<Trigger>& trigger) override {
    if (throws_on_compare) throw std::runtime_error("ranks disagree");
    add(trigger ? core::message("compare ", *trigger) : "compare the end");
  }
  void perform(const Operation& operation) override {
    if (operation.kind == throws_on) throw std::runtime_error("a rank is lost");
    after = operation.after;
    add(text_of(operation));
  }
  void leave_to_host(const std::optional<Trigger>& trigger) override {
    add(trigger ? core::message("leave ", *trigger) : "leave at the end");
  }
  void leave_before_forward() override { add("leave before a forward"); }

  /// What has come since the last call.
  std::string take() { return std::exchange(text_, ""); }

  bool throws_on_compare = false;
  std::optional<Kind> throws_on;
  std::vector<Dependency> after;  // of the newest operation

 protected:
  void add(const std::string& what) { text_ += (text_.empty() ? "" : ", ") + what; }

 private:
  std::string text_;
};

class ResolverTest : public testing::Test {
 protected:
  Resolver make(int num_replicates, const StepOptions& options = {}) {
    return Resolver(three_units(num_replicates, 2), options, batches_of({{0}, {1}, {2}}),
                    &recorder_);
  }

  static void forward(Resolver* resolver, const std::vector<UnitIndex>& units) {
    resolver->begin_forward(/*training=*/true);
    for (const UnitIndex unit : units) {
      resolver->before_use(unit);
      resolver->after_forward(unit);
    }
  }
  static void backward(Resolver* resolver, const std::vector<UnitIndex>& units) {
    resolver->begin_backward();
    for (const UnitIndex unit : units) {
      resolver->before_backward(unit);
      resolver->before_gradient(unit);
      resolver->after_backward(unit);
    }
    resolver->end_backward();
  }
  /// One step, so that all that follow are replays.
  void trace(Resolver* resolver) {
    forward(resolver, {kA, kB, kC});
    backward(resolver, {kC, kB, kA});
    resolver->settle_step();
    resolver->step();
    recorder_.take();
  }

  Recorder recorder_;
};

}  // namespace dmuon::schedule
