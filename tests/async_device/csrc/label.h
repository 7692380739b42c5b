#pragma once

#include <cstdint>
#include <string>

namespace async_device {

/// Which operation an entry is, and who issued it: cheap to make, told in words only when needed.
struct Label {
  const std::string* operation = nullptr;  // from `interned`
  uint64_t number = 0;                     // of a group's launch; 0 for all else
  uint32_t place = 0;                      // from `current_place`
};

/// One address for equal texts, for ever.
const std::string* interned(const std::string& text);

/// The Python lines outside PyTorch that the calling thread is in, else the node of autograd that
/// it runs. May take the GIL: not to be called with a lock held.
uint32_t current_place();

/// "'aten::add.Tensor' (train.py:12 forward < train.py:40 main)"
std::string describe(const Label& label);

}  // namespace async_device
