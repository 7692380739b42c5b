#include "dmuon/kernels/cuda/library.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string_view>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/driver.h"
#include "dmuon/kernels/cuda/parameters.h"

// The fat binary of each .cu file, with one cubin for each architecture (cmake/cuda_kernels.cmake).
// NOLINTBEGIN(readability-identifier-naming)
extern "C" const unsigned char dmuon_cuda_elementwise[];
extern "C" const unsigned char dmuon_cuda_symmetric80[];
extern "C" const unsigned char dmuon_cuda_symmetric90[];
extern "C" const unsigned char dmuon_cuda_full80[];
extern "C" const unsigned char dmuon_cuda_full90[];
// NOLINTEND(readability-identifier-naming)

namespace dmuon::kernels::cuda {
namespace {

// Such as 80 for sm_80; defined by cmake/cuda_kernels.cmake.
constexpr std::array kArchitectures{DMUON_CUDA_ARCHITECTURES};

enum Source { kElementwise, kSymmetric80, kFull80, kSymmetric90, kFull90, kNumSources };
constexpr std::array<const unsigned char*, kNumSources> kFatBinaries{
    dmuon_cuda_elementwise, dmuon_cuda_symmetric80, dmuon_cuda_full80, dmuon_cuda_symmetric90,
    dmuon_cuda_full90};

struct Carried {
  std::string_view name;
  std::size_t parameter_bytes;
  Source source;
};
constexpr int kProduct90Major = 9;  // the only devices with the kernels of product90.h
constexpr bool is_of_90(Source source) { return source == kSymmetric90 || source == kFull90; }
constexpr std::array kKernels{
    Carried{"write_scalars", sizeof(ScalarsParameters), kElementwise},
    Carried{"move_weights_f16", sizeof(MoveWeightsParameters), kElementwise},
    Carried{"move_weights_bf16", sizeof(MoveWeightsParameters), kElementwise},
    Carried{"multiply_f16", sizeof(MultiplyParameters), kElementwise},
    Carried{"multiply_bf16", sizeof(MultiplyParameters), kElementwise},
    Carried{"direction_f16", sizeof(DirectionParameters), kElementwise},
    Carried{"direction_again_f16", sizeof(DirectionParameters), kElementwise},
    Carried{"direction_bf16", sizeof(DirectionParameters), kElementwise},
    Carried{"direction_again_bf16", sizeof(DirectionParameters), kElementwise},
    Carried{"symmetric80_128_f16", sizeof(ProductParameters), kSymmetric80},
    Carried{"symmetric80_128_bf16", sizeof(ProductParameters), kSymmetric80},
    Carried{"symmetric80_64_f16", sizeof(ProductParameters), kSymmetric80},
    Carried{"symmetric80_64_bf16", sizeof(ProductParameters), kSymmetric80},
    Carried{"full80_128_f16", sizeof(ProductParameters), kFull80},
    Carried{"full80_128_bf16", sizeof(ProductParameters), kFull80},
    Carried{"symmetric90_f16", sizeof(Product90Parameters), kSymmetric90},
    Carried{"symmetric90_bf16", sizeof(Product90Parameters), kSymmetric90},
    Carried{"symmetric90_transposed_f16", sizeof(Product90Parameters), kSymmetric90},
    Carried{"symmetric90_transposed_bf16", sizeof(Product90Parameters), kSymmetric90},
    Carried{"full90_f16", sizeof(Product90Parameters), kFull90},
    Carried{"full90_bf16", sizeof(Product90Parameters), kFull90},
    Carried{"full90_transposed_f16", sizeof(Product90Parameters), kFull90},
    Carried{"full90_transposed_bf16", sizeof(Product90Parameters), kFull90},
};

void check(Result result, const std::string& what) {
  if (result != 0) throw core::CudaError(core::message(what, ": ", name_of(result)));
}

struct OnDevice {
  Context context = nullptr;
  std::array<Kernel, kKernels.size()> kernels{};
};

int attribute(DeviceAttribute which, int device) {
  int value = 0;
  check(driver()->device_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

Kernel load_kernel(const Carried& carried, int device) {
  // Each for all devices; under the mutex of on_device().
  static std::array<Library, kNumSources> libraries{};
  Library& library = libraries.at(carried.source);
  if (library == nullptr) {
    check(driver()->load_library(&library, kFatBinaries.at(carried.source), nullptr, nullptr, 0,
                                 nullptr, nullptr, 0),
          "cuLibraryLoadData");
  }
  const std::string name(carried.name);
  Kernel kernel = nullptr;
  check(driver()->get_kernel(&kernel, library, name.c_str()), "cuLibraryGetKernel " + name);
  if (is_of_90(carried.source)) {
    check(
        driver()->set_kernel_attribute(kMostSharedBytes, 4 * kProduct90SharedWords, kernel, device),
        "cuKernelSetAttribute " + name);
  }
  return kernel;
}

// Retains the primary context and loads every kernel that the device has.
OnDevice load(int device) {
  OnDevice loaded;
  check(driver()->retain_primary(&loaded.context, device), "cuDevicePrimaryCtxRetain");
  const bool has_all = has_product90(device);
  for (std::size_t i = 0; i < kKernels.size(); ++i) {
    if (has_all || !is_of_90(kKernels.at(i).source))
      loaded.kernels.at(i) = load_kernel(kKernels.at(i), device);
  }
  return loaded;
}

const OnDevice& on_device(int device) {
  static std::mutex mutex;
  static std::map<int, OnDevice> devices;
  const std::scoped_lock lock(mutex);
  auto found = devices.find(device);
  if (found == devices.end()) found = devices.emplace(device, load(device)).first;
  return found->second;
}

// The device's primary context, current in this thread while this object lives. A thread that has
// called nothing of the CUDA runtime yet has no context; there the primary one remains.
class Current {
 public:
  explicit Current(Context context) {
    check(driver()->current_context(&before_), "cuCtxGetCurrent");
    if (before_ == context) return;
    check(driver()->set_current_context(context), "cuCtxSetCurrent");
    restores_ = before_ != nullptr;
  }
  ~Current() {
    if (restores_) driver()->set_current_context(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  Context before_ = nullptr;
  bool restores_ = false;
};

// A cubin runs on its own compute capability and on later minor versions of it.
bool has_image(int capability) {
  return std::ranges::any_of(kArchitectures, [&](int architecture) {
    return architecture / 10 == capability / 10 && architecture <= capability;
  });
}

}  // namespace

std::string unavailable(int device) {
  if (driver() == nullptr) return why_no_driver();
  try {
    const int major = attribute(kMajor, device);
    const int minor = attribute(kMinor, device);
    const std::string has =
        core::message("device ", device, " has compute capability ", major, ".", minor);
    if (major < 8) return has + ", before 8.0, which dmuon's kernels need";
    if (!has_image(10 * major + minor)) return has + ", for which dmuon carries no kernels";
    prepare(device);
  } catch (const core::CudaError& error) {
    return core::message("device ", device, " refuses dmuon's kernels: ", error.what());
  }
  return "";
}

void prepare(int device) {
  if (driver() == nullptr) throw core::CudaError("prepare: " + why_no_driver());
  on_device(device);
}

bool is_captured(void* stream) {
  if (driver() == nullptr) throw core::CudaError("is_captured: " + why_no_driver());
  int status = 0;
  const Result result = driver()->is_capturing(stream, &status);
  if (result == kInvalidContext) return false;
  return result != 0 || status != 0;
}

int num_multiprocessors(int device) {
  if (driver() == nullptr) throw core::CudaError("num_multiprocessors: " + why_no_driver());
  return attribute(kMultiprocessors, device);
}

bool has_product90(int device) {
  int major = 0;
  return driver() != nullptr && driver()->device_attribute(&major, kMajor, device) == 0 &&
         major == kProduct90Major;
}

TensorMap tensor_map(const Mapped& x) {
  if (driver() == nullptr) throw core::CudaError("tensor_map: " + why_no_driver());
  const auto size = [](std::int64_t value) { return static_cast<unsigned long>(value); };
  const std::array<unsigned long, 3> sizes{size(x.cols), size(x.rows), size(x.batch)};
  const std::array<unsigned long, 2> bytes{
      size(2 * x.row_stride), size(2 * (x.batch == 1 ? x.rows * x.row_stride : x.batch_stride))};
  const std::array<unsigned, 3> box{kProduct90Depth, static_cast<unsigned>(x.box_rows), 1};
  const std::array<unsigned, 3> ones{1, 1, 1};
  TensorMap map{};  // not the caller's object, which GCC 12 does not always align
  check(
      driver()->encode_tensor_map(&map, x.format == Half::kFp16 ? kTensorFp16 : kTensorBFloat16, 3,
                                  const_cast<void*>(x.data), sizes.data(), bytes.data(), box.data(),
                                  ones.data(), kNoInterleave, kSwizzle128, kPromote256, kFillZeros),
      "cuTensorMapEncodeTiled");
  return TensorMap(map);
}

void launch(const Launch& launch, const void* parameters, std::size_t bytes, int device,
            void* stream) {
  if (driver() == nullptr) throw core::CudaError("launch: " + why_no_driver());
  const std::string what = core::message("launch of the CUDA kernel ", launch.kernel);
  const auto* const carried = std::ranges::find(kKernels, launch.kernel, &Carried::name);
  core::invariant(carried != kKernels.end(), what, ": there is no such kernel");
  core::invariant(carried->parameter_bytes == bytes, what, ": expected ", carried->parameter_bytes,
                  " bytes of parameters, got ", bytes);
  try {
    const OnDevice& loaded = on_device(device);
    const Current current(loaded.context);
    const auto index = static_cast<std::size_t>(carried - kKernels.begin());
    std::array<void*, 1> arguments{const_cast<void*>(parameters)};
    LaunchAttribute early{};
    early.id = kProgrammaticSerialization;
    early.value.allowed = 1;
    LaunchConfiguration configuration{};
    configuration.grid_x = launch.grid_x;
    configuration.grid_y = launch.grid_y;
    configuration.block_x = launch.threads;
    configuration.shared_bytes = launch.shared_bytes;
    configuration.stream = stream;
    if (launch.begins_early) {
      configuration.attributes = &early;
      configuration.num_attributes = 1;
    }
    check(driver()->launch(&configuration, loaded.kernels.at(index), arguments.data(), nullptr),
          "cuLaunchKernelEx");
  } catch (const core::CudaError& error) {
    throw core::CudaError(core::message(what, " on device ", device, ": ", error.what()));
  }
}

}  // namespace dmuon::kernels::cuda
