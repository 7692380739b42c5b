#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "async_device/csrc/group.h"

namespace async_device {

/// A launch that can be waited for. `wait` makes the calling thread's current stream wait, not the
/// host. A barrier also makes the host wait.
class GroupWork final : public c10d::Work {
 public:
  /// @param flight  null for a part of a coalesced launch, which has no work of its own.
  GroupWork(int rank, c10d::OpType type, std::shared_ptr<Flight> flight, int device,
            Tensors results, bool blocks_host);

  bool isCompleted() override;
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::shared_ptr<Flight> flight_;
  int device_;
  Tensors results_;
  bool blocks_host_;
};

}  // namespace async_device
