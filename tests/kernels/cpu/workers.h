#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "dmuon/kernels/cpu/products.h"

namespace dmuon::kernels::cpu {

inline const Workers serially{
    1, [](std::int64_t count, const OnRange& on_range) { on_range(0, count); }};

// A thread for each piece, which begin in reverse.
inline const Workers on_threads{7, [](std::int64_t count, const OnRange& on_range) {
                                  std::vector<std::thread> threads;
                                  for (std::int64_t i = count; i-- > 0;)
                                    threads.emplace_back(on_range, i, i + 1);
                                  for (std::thread& thread : threads) thread.join();
                                }};

}  // namespace dmuon::kernels::cpu
