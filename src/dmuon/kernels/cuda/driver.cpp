#include "dmuon/kernels/cuda/driver.h"

#include <dlfcn.h>

#include "dmuon/core/error.h"

namespace dmuon::kernels::cuda {
namespace {

constexpr int kOldest = 12000;  // the first with cuLibraryLoadData

template <typename Function>
bool find(void* library, const char* symbol, Function*& function, std::string& why) {
  function = reinterpret_cast<Function*>(dlsym(library, symbol));
  if (function == nullptr && why.empty()) {
    why = core::message("the CUDA driver has no ", symbol, "; CUDA 12.0 or later is needed");
  }
  return function != nullptr;
}

std::string name_by(const Driver& driver, Result result) {
  const char* name = nullptr;
  if (driver.error_name(result, &name) != 0 || name == nullptr) name = "unknown error";
  return core::message(name, " (", result, ")");
}

struct Opened {
  Driver driver{};
  std::string why;  // empty: the driver is usable

  Opened() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      why = core::message("there is no CUDA driver: ", dlerror());
      return;
    }
    // The names that cuda.h's macros export for the declarations.
    if (!find(library, "cuInit", driver.init, why) ||
        !find(library, "cuDriverGetVersion", driver.driver_version, why) ||
        !find(library, "cuDeviceGetAttribute", driver.device_attribute, why) ||
        !find(library, "cuDevicePrimaryCtxRetain", driver.retain_primary, why) ||
        !find(library, "cuCtxGetCurrent", driver.current_context, why) ||
        !find(library, "cuCtxSetCurrent", driver.set_current_context, why) ||
        !find(library, "cuLibraryLoadData", driver.load_library, why) ||
        !find(library, "cuLibraryGetKernel", driver.get_kernel, why) ||
        !find(library, "cuLaunchKernelEx", driver.launch, why) ||
        !find(library, "cuKernelSetAttribute", driver.set_kernel_attribute, why) ||
        !find(library, "cuTensorMapEncodeTiled", driver.encode_tensor_map, why) ||
        !find(library, "cuStreamIsCapturing", driver.is_capturing, why) ||
        !find(library, "cuStreamBeginCapture_v2", driver.begin_capture, why) ||
        !find(library, "cuStreamEndCapture", driver.end_capture, why) ||
        !find(library, "cuGraphInstantiateWithFlags", driver.instantiate, why) ||
        !find(library, "cuGraphLaunch", driver.launch_graph, why) ||
        !find(library, "cuGraphExecDestroy", driver.destroy_executable, why) ||
        !find(library, "cuGraphDestroy", driver.destroy_graph, why) ||
        !find(library, "cuGetErrorName", driver.error_name, why)) {
      return;
    }
    int version = 0;
    if (driver.driver_version(&version) != 0 || version < kOldest) {
      why = core::message("the CUDA driver is too old: expected CUDA 12.0 or later, got ",
                          version / 1000, ".", version % 1000 / 10);
    } else if (const Result result = driver.init(0); result != 0) {
      why = "the CUDA driver does not start: " + name_by(driver, result);
    }
  }
};

const Opened& opened() {
  static const Opened kOpened;
  return kOpened;
}

}  // namespace

const Driver* driver() { return opened().why.empty() ? &opened().driver : nullptr; }
const std::string& why_no_driver() { return opened().why; }

std::string name_of(Result result) { return name_by(*driver(), result); }

}  // namespace dmuon::kernels::cuda
