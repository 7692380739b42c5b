#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace dmuon::wire {

/// While it lives, operations of this thread are plain: autograd records none of them, and no
/// transform of torch.func that the caller is inside of sees them.
class PlainMode {
 private:
  using Key = c10::DispatchKey;

  c10::AutoGradMode no_grad_{false};
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_transforms_{
      c10::DispatchKeySet({Key::FuncTorchDynamicLayerFrontMode, Key::FuncTorchDynamicLayerBackMode,
                           Key::FuncTorchGradWrapper, Key::FuncTorchVmapMode, Key::FuncTorchBatched,
                           Key::FuncTorchBatchedDecomposition})};
};

}  // namespace dmuon::wire
