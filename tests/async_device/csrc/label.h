#pragma once

#include <cstdint>
#include <string>

namespace async_device {

/// An entry's operation and issuer. Cheap to make; becomes words only when needed.
struct Label {
  const std::string* operation = nullptr;  // from `interned`
  uint64_t number = 0;                     // of a group's launch; 0 for all else
  uint32_t place = 0;                      // from `current_place`
};

/// Returns one address for equal texts, for ever.
const std::string* interned(const std::string& text);

/// Returns the calling thread's Python lines outside PyTorch, otherwise its node of autograd. May
/// take the GIL: do not call it with a lock held.
uint32_t current_place();

/// "'aten::add.Tensor' (train.py:12 forward < train.py:40 main)"
std::string describe(const Label& label);

}  // namespace async_device
