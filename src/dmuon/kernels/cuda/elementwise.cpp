#include "dmuon/kernels/cuda/elementwise.h"

#include <limits>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/library.h"
#include "dmuon/kernels/cuda/parameters.h"

namespace dmuon::kernels::cuda {
namespace {

constexpr std::int64_t kMaxBatch = 65535;  // blocks along y
constexpr std::int64_t kMaxEntries = std::numeric_limits<int>::max();

bool aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

void check_matrix(const char* function, const char* name, const void* data, std::size_t entry_bytes,
                  std::int64_t row_stride, std::int64_t batch_stride) {
  core::require(data != nullptr && aligned(data, entry_bytes), function, ": ", name,
                " must be an address that is a multiple of ", entry_bytes, "; got ", data);
  core::require(row_stride >= 0 && batch_stride >= 0, function, ": strides of ", name,
                " must be at least 0; got ", row_stride, " and ", batch_stride);
}

void check_sizes(const char* function, std::int64_t batch, std::int64_t rows, std::int64_t cols) {
  core::require(batch >= 0 && batch <= kMaxBatch, function, ": batch must be in [0, ", kMaxBatch,
                "]; got ", batch);
  core::require(rows >= 0 && cols >= 0, function, ": rows and cols must be at least 0; got ", rows,
                " and ", cols);
  core::require(cols == 0 || rows <= kMaxEntries / cols, function, ": a matrix must have at most ",
                kMaxEntries, " entries; got ", rows, " x ", cols);
}

// True if the four entries from any multiple of 4 on are aligned to four entries' bytes.
bool in_fours(const void* data, std::size_t entry_bytes, std::int64_t row_stride,
              std::int64_t batch_stride) {
  return aligned(data, 4 * entry_bytes) && row_stride % 4 == 0 && batch_stride % 4 == 0;
}

}  // namespace

void move_weights(const MoveWeights& move, int device, void* stream) {
  check_sizes("move_weights", move.batch, move.rows, move.cols);
  if (move.batch == 0 || move.rows == 0 || move.cols == 0) return;
  check_matrix("move_weights", "w", move.w, 4, move.w_row_stride, move.w_batch_stride);
  check_matrix("move_weights", "u", move.u, 2, move.u_row_stride, move.u_batch_stride);
  core::require(move.applies != nullptr, "move_weights: applies must be an address; got null");

  MoveWeightsParameters parameters{};
  parameters.w = move.w;
  parameters.u = static_cast<const std::uint16_t*>(move.u);
  parameters.applies = move.applies;
  parameters.w_row_stride = move.w_row_stride;
  parameters.w_batch_stride = move.w_batch_stride;
  parameters.u_row_stride = move.u_row_stride;
  parameters.u_batch_stride = move.u_batch_stride;
  parameters.rows = static_cast<int>(move.rows);
  parameters.cols = static_cast<int>(move.cols);
  const bool fours = in_fours(move.w, 4, move.w_row_stride, move.w_batch_stride) &&
                     in_fours(move.u, 2, move.u_row_stride, move.u_batch_stride);
  parameters.width = fours ? 4 : 1;
  parameters.decay = move.decay;
  parameters.factor = move.factor;

  const std::int64_t items = (move.cols + parameters.width - 1) / parameters.width * move.rows;
  const std::int64_t blocks = (items + kMoveWeightsThreads - 1) / kMoveWeightsThreads;
  launch({.kernel = move.u_format == Half::kFp16 ? "move_weights_f16" : "move_weights_bf16",
          .grid_x = static_cast<unsigned>(blocks),
          .grid_y = static_cast<unsigned>(move.batch),
          .threads = kMoveWeightsThreads,
          .shared_bytes = 0},
         &parameters, sizeof parameters, device, stream);
}

}  // namespace dmuon::kernels::cuda
