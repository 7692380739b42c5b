#include "async_device/csrc/group_work.h"

#include <utility>

#include "async_device/csrc/settings.h"
#include "async_device/csrc/tensors.h"

namespace async_device {

GroupWork::GroupWork(int rank, c10d::OpType type, std::shared_ptr<Flight> flight, int device,
                     Tensors results, bool blocks_host)
    : Work(rank, type),
      flight_(std::move(flight)),
      device_(device),
      results_(std::move(results)),
      blocks_host_(blocks_host) {}

bool GroupWork::isCompleted() { return flight_ == nullptr || Device::get().query(flight_->end); }

bool GroupWork::wait(std::chrono::milliseconds) {
  synchronize();
  return true;
}

void GroupWork::synchronize() {
  if (flight_ == nullptr) return;
  Device& device = Device::get();
  const std::string error = device.error_of(flight_->launch);
  if (!error.empty()) raise(error);
  device.wait(device.current_stream(device_), flight_->end);
  flight_->held.clear();
  if (!blocks_host_) return;
  device.host_sync("barrier");
  device.synchronize(flight_->end);
}

c10::intrusive_ptr<c10::ivalue::Future> GroupWork::getFuture() {
  const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(device_));
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
  if (flight_ == nullptr) {
    future->markCompleted(c10::IValue(results_));
    return future;
  }
  // A future's tensors are ready when what is in the current streams is.
  Stream* before = Device::get().exchange_stream(flight_->end->stream);
  future->markCompleted(c10::IValue(results_));
  Device::get().exchange_stream(before);
  return future;
}

}  // namespace async_device
