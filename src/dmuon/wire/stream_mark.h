#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

namespace dmuon::wire {

/// A place in the order of a device's streams: all that was issued before it, on the stream that
/// was the current one then. Nothing on a CPU, which has no streams. Not thread-safe.
class StreamMark {
 public:
  /// Moves to the end of the current stream, which then comes after where the mark was.
  void set(c10::Device device);

  /// What is issued to the current stream from now on comes after it.
  void wait() const;

 private:
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> event_;
};

}  // namespace dmuon::wire
