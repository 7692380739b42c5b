#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

namespace dmuon::wire {

/// The device has streams.
c10::Stream current_stream(c10::Device device);

/// Work that `second` gets from now on waits for all that `first` has got.
void order(const c10::Stream& first, const c10::Stream& second);

/// Orders work on different streams of a device.
///
///   mark.set(device);  // after the last use of a buffer, on whichever stream is current
///   mark.wait();       // before the next use, on another stream
///
/// On a CPU, which has no streams, both are no-ops. Not thread-safe.
class StreamMark {
 public:
  /// Makes the current stream wait for the mark, then moves the mark to the end of this stream.
  void set(c10::Device device);

  /// Makes the current stream wait for all work before the mark.
  void wait() const;

 private:
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> event_;
};

}  // namespace dmuon::wire
