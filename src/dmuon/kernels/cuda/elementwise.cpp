#include "dmuon/kernels/cuda/elementwise.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "dmuon/core/divided_up.h"
#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/library.h"
#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda {
namespace {

// A block's indices beyond the matrix fit an int too.
constexpr std::int64_t kMaxEntries =
    (std::int64_t{1} << 31) - std::int64_t{4} * kMoveWeightsThreads;

bool aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// Of rows, of inner batches, of batches.
using Strides = std::array<std::int64_t, 3>;

void check_matrix(const char* function, const char* name, const void* data, std::size_t entry_bytes,
                  const Strides& strides) {
  core::require(data != nullptr && aligned(data, entry_bytes), function, ": ", name,
                " must be an address that is a multiple of ", entry_bytes, "; got ", data);
  core::require(std::ranges::min(strides) >= 0, function, ": strides of ", name,
                " must be at least 0; got ", strides[0], ", ", strides[1], " and ", strides[2]);
}

void check_sizes(const char* function, std::int64_t batch, std::int64_t inner_batch,
                 std::int64_t rows, std::int64_t cols) {
  core::require(inner_batch >= 1 && inner_batch <= kMaxBatch, function,
                ": inner_batch must be in [1, ", kMaxBatch, "]; got ", inner_batch);
  core::require(batch >= 0 && batch <= kMaxBatch, function, ": batch must be in [0, ", kMaxBatch,
                "]; got ", batch);
  core::require(rows >= 0 && cols >= 0, function, ": rows and cols must be at least 0; got ", rows,
                " and ", cols);
  core::require(cols == 0 || rows <= kMaxEntries / cols, function, ": a matrix must have at most ",
                kMaxEntries, " entries; got ", rows, " x ", cols);
}

// True if the four entries from any multiple of 4 on are aligned to four entries' bytes.
bool in_fours(const void* data, std::size_t entry_bytes, const Strides& strides) {
  return aligned(data, 4 * entry_bytes) &&
         std::ranges::all_of(strides, [](std::int64_t stride) { return stride % 4 == 0; });
}

// Blocks of the kernel that usually ends at once, in a whole batch: two of each multiprocessor of
// an H100. Where it has to write x anew, each takes several parts.
constexpr std::int64_t kBlocksAgain = 264;

// Parts of a matrix.
std::int64_t num_parts(const DirectionOf& direction) {
  constexpr std::int64_t kEntries = std::int64_t{4} * kDirectionThreads * kDirectionFours;
  return core::divided_up(direction.x_rows * direction.x_cols, kEntries);
}

Strides strides_of(const DirectionOf& direction) {
  return {direction.row_stride, direction.inner_stride, direction.batch_stride};
}

void check_direction(const DirectionOf& direction) {
  constexpr const char* kName = "direction";
  check_sizes(kName, direction.batch, direction.inner_batch, direction.rows, direction.cols);
  check_sizes(kName, direction.batch, direction.inner_batch, direction.x_rows, direction.x_cols);
  if (direction.squares != nullptr) check_matrix(kName, "squares", direction.squares, 4, {});
  core::require(direction.x_rows >= direction.rows && direction.x_cols >= direction.cols &&
                    direction.x_cols % 4 == 0,
                kName, ": x_rows and x_cols must be at least ", direction.rows, " and ",
                direction.cols, ", x_cols a multiple of 4; got ", direction.x_rows, " and ",
                direction.x_cols);
  for (const auto& [name, data, bytes] :
       {std::tuple<const char*, const void*, std::size_t>{"gradient", direction.gradient, 4},
        {"momentum", direction.momentum, 4},
        {"x", direction.x, 8},
        {"memo", direction.memo, 4},
        {"partial", direction.partial, 8},
        {"rest", direction.rest, 4},
        {"applies", direction.applies, 1}}) {
    check_matrix(kName, name, data, bytes, strides_of(direction));
  }
}

DirectionParameters parameters_of(const DirectionOf& direction) {
  DirectionParameters parameters{};
  parameters.gradient = direction.gradient;
  parameters.momentum = direction.momentum;
  parameters.x = static_cast<std::uint16_t*>(direction.x);
  parameters.rest = direction.rest;
  parameters.gradient_factor = direction.gradient_factor;
  parameters.applies = direction.applies;
  parameters.memo = direction.memo;
  parameters.squares = direction.squares;
  parameters.partial = direction.partial;
  parameters.row_stride = direction.row_stride;
  parameters.inner_stride = direction.inner_stride;
  parameters.batch_stride = direction.batch_stride;
  parameters.inner_batch = static_cast<int>(direction.inner_batch);
  parameters.rows = static_cast<int>(direction.rows);
  parameters.cols = static_cast<int>(direction.cols);
  parameters.x_rows = static_cast<int>(direction.x_rows);
  parameters.x_cols = static_cast<int>(direction.x_cols);
  parameters.fours_a_row = Divisor::by(static_cast<std::uint32_t>(direction.x_cols / 4));
  const std::int64_t parts = num_parts(direction);
  const std::int64_t again = std::max<std::int64_t>(1, kBlocksAgain / direction.batch);
  parameters.num_parts = static_cast<int>(parts);
  parameters.blocks_again = static_cast<int>(std::min(parts, again));
  parameters.eps = static_cast<float>(direction.eps);
  parameters.nesterov = direction.nesterov;
  const auto whole = [&](const float* data) {
    return in_fours(data, 4, strides_of(direction)) && direction.cols % 4 == 0;
  };
  parameters.in_fours = whole(direction.gradient) && whole(direction.momentum);
  return parameters;
}

}  // namespace

void write_scalars(std::span<const float> values, float* out, int device, void* stream) {
  check_matrix("write_scalars", "out", out, 4, {});
  while (!values.empty()) {
    const std::size_t count = std::min<std::size_t>(values.size(), kMostScalars);
    ScalarsParameters parameters{.out = out, .count = static_cast<int>(count), .values = {}};
    std::ranges::copy(values.first(count), parameters.values);
    launch({.kernel = "write_scalars", .threads = kScalarsThreads}, &parameters, sizeof parameters,
           device, stream);
    values = values.subspan(count);
    out += count;
  }
}

std::int64_t partial_words(const DirectionOf& direction) {
  return 2 * direction.batch * num_parts(direction);
}

void direction(const DirectionOf& direction, int device, void* stream) {
  if (direction.batch == 0 || direction.x_rows == 0 || direction.x_cols == 0) return;
  check_direction(direction);
  const DirectionParameters parameters = parameters_of(direction);
  const bool fp16 = direction.x_format == Half::kFp16;
  for (const auto& [kernel, blocks] :
       {std::pair{fp16 ? "direction_f16" : "direction_bf16", parameters.num_parts},
        {fp16 ? "direction_again_f16" : "direction_again_bf16", parameters.blocks_again}}) {
    launch({.kernel = kernel,
            .grid_x = static_cast<unsigned>(blocks),
            .grid_y = static_cast<unsigned>(direction.batch),
            .threads = kDirectionThreads,
            .shared_bytes = 4 * kDirectionSharedWords},
           &parameters, sizeof parameters, device, stream);
  }
}

void move_weights(const MoveWeights& move, int device, void* stream) {
  check_sizes("move_weights", move.batch, move.inner_batch, move.rows, move.cols);
  if (move.batch == 0 || move.rows == 0 || move.cols == 0) return;
  const Strides w_strides{move.w_row_stride, move.w_inner_stride, move.w_batch_stride};
  const Strides u_strides{move.u_row_stride, move.u_inner_stride, move.u_batch_stride};
  check_matrix("move_weights", "w", move.w, 4, w_strides);
  check_matrix("move_weights", "u", move.u, 2, u_strides);
  core::require(move.applies != nullptr, "move_weights: applies must be an address; got null");
  check_matrix("move_weights", "decay", move.decay, 4, {});
  check_matrix("move_weights", "factor", move.factor, 4, {});
  if (move.scales != nullptr)
    check_matrix("move_weights", "scales", move.scales, 4, {move.scale_stride, 0, 0});

  MoveWeightsParameters parameters{};
  parameters.w = move.w;
  parameters.u = static_cast<const std::uint16_t*>(move.u);
  parameters.applies = move.applies;
  parameters.decay = move.decay;
  parameters.factor = move.factor;
  parameters.w_row_stride = move.w_row_stride;
  parameters.w_inner_stride = move.w_inner_stride;
  parameters.w_batch_stride = move.w_batch_stride;
  parameters.u_row_stride = move.u_row_stride;
  parameters.u_inner_stride = move.u_inner_stride;
  parameters.u_batch_stride = move.u_batch_stride;
  parameters.scales = move.scales;
  parameters.scale_stride = move.scale_stride;
  parameters.inner_batch = static_cast<int>(move.inner_batch);
  parameters.rows = static_cast<int>(move.rows);
  parameters.cols = static_cast<int>(move.cols);
  parameters.width = in_fours(move.w, 4, w_strides) && in_fours(move.u, 2, u_strides) ? 4 : 1;
  parameters.scale = move.scale;

  const std::int64_t units_a_row = core::divided_up(move.cols, parameters.width);
  parameters.units_a_row = Divisor::by(static_cast<std::uint32_t>(units_a_row));
  const std::int64_t of_block = std::int64_t{kMoveWeightsThreads} * (4 / parameters.width);
  const std::int64_t blocks = core::divided_up(units_a_row * move.rows, of_block);
  launch({.kernel = move.u_format == Half::kFp16 ? "move_weights_f16" : "move_weights_bf16",
          .grid_x = static_cast<unsigned>(blocks),
          .grid_y = static_cast<unsigned>(move.batch),
          .threads = kMoveWeightsThreads,
          .shared_bytes = 0},
         &parameters, sizeof parameters, device, stream);
}

void multiply(const Multiply& multiply, int device, void* stream) {
  check_sizes("multiply", multiply.batch, 1, 1, multiply.entries);
  if (multiply.batch == 0 || multiply.entries == 0) return;
  core::require(multiply.entries % 8 == 0, "multiply: entries must be a multiple of 8; got ",
                multiply.entries);
  check_matrix("multiply", "x", multiply.x, 16, {});
  check_matrix("multiply", "factors", multiply.factors, 4, {multiply.factor_stride, 0, 0});
  const MultiplyParameters parameters{.x = static_cast<std::uint16_t*>(multiply.x),
                                      .factors = multiply.factors,
                                      .factor_stride = multiply.factor_stride,
                                      .num_eights = static_cast<int>(multiply.entries / 8)};
  constexpr int kEights = kMultiplyThreads * kMultiplyEights;
  launch({.kernel = multiply.format == Half::kFp16 ? "multiply_f16" : "multiply_bf16",
          .grid_x = static_cast<unsigned>(core::divided_up(parameters.num_eights, kEights)),
          .grid_y = static_cast<unsigned>(multiply.batch),
          .threads = kMultiplyThreads,
          .shared_bytes = 0},
         &parameters, sizeof parameters, device, stream);
}

}  // namespace dmuon::kernels::cuda
