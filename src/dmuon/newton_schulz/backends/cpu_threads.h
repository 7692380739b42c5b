#pragma once

#include <cstdint>
#include <functional>

namespace dmuon::newton_schulz::cpu {

/// Calls `on_range` on ranges that make up [0, count), on PyTorch's threads, as many as
/// at::get_num_threads says; inside of one of their tasks on this one alone. Returns when all are
/// done; an exception of one leaves through it.
///
/// at::parallel_for does not do: it is a header's template, and runs serially in what is compiled
/// without OpenMP, of which PyTorch brings its own.
void on_threads(std::int64_t count,
                const std::function<void(std::int64_t begin, std::int64_t end)>& on_range);

}  // namespace dmuon::newton_schulz::cpu
