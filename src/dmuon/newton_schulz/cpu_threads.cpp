#include "dmuon/newton_schulz/cpu_threads.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

namespace dmuon::newton_schulz::cpu {

// A TensorIterator divides the addresses of `count` bytes, which are neither read nor written.
void on_threads(std::int64_t count,
                const std::function<void(std::int64_t begin, std::int64_t end)>& on_range) {
  if (count == 0) return;
  if (count == 1 || at::get_num_threads() == 1 || at::in_parallel_region()) {
    return on_range(0, count);
  }
  const at::Tensor places = at::empty({count}, at::kByte);
  const auto* first = static_cast<const char*>(places.const_data_ptr());
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).resize_outputs(false).set_check_mem_overlap(false);
  config.add_output(places);
  config.build().for_each(
      [&](char** data, const std::int64_t* strides, std::int64_t size0, std::int64_t size1) {
        for (std::int64_t row = 0; row < size1; ++row) {
          const std::int64_t begin = data[0] + row * strides[1] - first;
          on_range(begin, begin + size0);
        }
      },
      /*grain_size=*/1);
}

}  // namespace dmuon::newton_schulz::cpu
