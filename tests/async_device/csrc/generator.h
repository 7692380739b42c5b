#pragma once

#include <ATen/core/Generator.h>

namespace async_device {

/// The generator of random numbers of this device. Operators draw a seed from it when they are
/// issued, so values depend on the order of issue alone.
const at::Generator& default_generator(int index);

}  // namespace async_device
