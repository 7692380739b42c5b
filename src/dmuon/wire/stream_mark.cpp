#include "dmuon/wire/stream_mark.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace dmuon::wire {

void StreamMark::set(c10::Device device) {
  if (device.is_cpu()) return;
  wait();
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (!event_) event_.emplace(device.type());
  event_->record(current);
  stream_ = current;
}

void StreamMark::wait() const {
  if (!stream_) return;
  const c10::impl::VirtualGuardImpl guard(stream_->device_type());
  const c10::Stream current = guard.getStream(stream_->device());
  if (current != *stream_) event_->block(current);
}

}  // namespace dmuon::wire
