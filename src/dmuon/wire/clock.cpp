#include "dmuon/wire/clock.h"

#include <c10/core/Event.h>

#include <chrono>

#include "dmuon/wire/stream_mark.h"

namespace dmuon::wire {

double Clock::host_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void Clock::start() {
  if (device_.is_cpu()) return;
  base_ = timed();
  base_.event->synchronize();
  base_.host = host_now();
  timing_ = true;
}

Instant Clock::now() const {
  if (device_.is_cpu() || !timing_) return {host_now(), nullptr};
  return timed();
}

Instant Clock::timed() const {
  auto event = std::make_shared<c10::Event>(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  event->record(current_stream(device_));
  return {host_now(), std::move(event)};
}

double Clock::seconds(const Instant& instant) const {
  if (!instant.event) return instant.host;
  instant.event->synchronize();
  return base_.host + base_.event->elapsedTime(*instant.event) / 1e3;
}

}  // namespace dmuon::wire
