#pragma once

#include <cstdint>
#include <functional>

namespace dmuon::newton_schulz::cpu {

/// Calls `on_range` on ranges that make up [0, count), on at::get_num_threads() threads of PyTorch.
/// Inside a task of these threads it uses the calling thread alone. Returns when all ranges are
/// done; rethrows an exception of a range.
///
/// at::parallel_for cannot replace it: the template is serial in code that is compiled without
/// OpenMP, and PyTorch brings its own OpenMP.
void on_threads(std::int64_t count,
                const std::function<void(std::int64_t begin, std::int64_t end)>& on_range);

}  // namespace dmuon::newton_schulz::cpu
