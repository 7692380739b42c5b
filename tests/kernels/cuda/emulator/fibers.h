#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace dmuon::kernels::cuda::emulator {

/// Functions that run in turns on one thread, each on a stack of its own.
///
///   fiber.start([] { ...; Fiber::pause(); ... });
///   while (!fiber.ended()) fiber.resume();
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(Fiber&&) noexcept;

  /// Sets what the next resume() begins. The fiber has ended, or was abandoned.
  void start(std::function<void()> body);
  /// Runs the fiber until it pauses or ends.
  void resume();
  /// Returns to the caller of resume(). Called inside a fiber.
  static void pause();
  bool ended() const;
  /// True if the fiber wrote below its stack.
  bool overflowed() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dmuon::kernels::cuda::emulator
