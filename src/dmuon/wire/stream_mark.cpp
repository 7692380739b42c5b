#include "dmuon/wire/stream_mark.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace dmuon::wire {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void order(const c10::Stream& first, const c10::Stream& second) {
  if (first == second) return;
  c10::Event event(first.device_type());
  event.record(first);
  event.block(second);
}

void StreamMark::set(c10::Device device) {
  if (device.is_cpu()) return;
  wait();
  const c10::Stream current = current_stream(device);
  if (!event_) event_.emplace(device.type());
  event_->record(current);
  stream_ = current;
}

void StreamMark::wait() const {
  if (!stream_) return;
  const c10::Stream current = current_stream(stream_->device());
  if (current != *stream_) event_->block(current);
}

}  // namespace dmuon::wire
