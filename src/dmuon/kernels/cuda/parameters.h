#pragma once

#include <cstdint>

// Parameters of kernels: plain C++, which nvcc, the host's launches and the tests' emulator read.
namespace dmuon::kernels::cuda {

enum class Half { kFp16, kBFloat16 };

/// Divides by an integer of the host's, by a multiplication: quotient.h.
struct Divisor {
  std::uint32_t multiplier;
  int shift;

  /// @param divisor  in [1, 2^31].
  static constexpr Divisor by(std::uint32_t divisor) {
    int shift = 0;
    while ((std::uint64_t{1} << shift) < divisor) ++shift;
    const std::uint64_t numerator = std::uint64_t{1} << (31 + shift);
    return {static_cast<std::uint32_t>((numerator + divisor - 1) / divisor), shift};
  }
};

/// out[i] <- values[i] for i < count. The launch itself carries the values.
///
/// Grid: (1, 1).
inline constexpr int kMostScalars = 480;
struct ScalarsParameters {
  float* out;
  int count;  ///< at most kMostScalars
  float values[kMostScalars];
};

inline constexpr int kScalarsThreads = 128;

/// w <- *decay w + (*factor scale scales[b]) u where *applies is not 0; else no byte of w is
/// written. Each product and the sum round to fp32.
///
/// Grid: (blocks of kMoveWeightsThreads items of 4 entries, batch). An item is 4 neighbours of a
/// row, or, with width 1, entries kMoveWeightsThreads apart. Matrix i of w begins at i /
/// inner_batch * w_batch_stride + i % inner_batch * w_inner_stride entries, and so does u's by its
/// strides.
struct MoveWeightsParameters {
  float* w;                ///< [batch][rows][cols]
  const std::uint16_t* u;  ///< [batch][rows][cols], in the kernel's 16-bit format
  const std::uint8_t* applies;
  const float* decay;
  const float* factor;
  std::int64_t w_row_stride;  ///< strides in elements
  std::int64_t w_inner_stride;
  std::int64_t w_batch_stride;
  std::int64_t u_row_stride;
  std::int64_t u_inner_stride;
  std::int64_t u_batch_stride;
  const float* scales;  ///< [batch], scale_stride words apart; null: 1
  std::int64_t scale_stride;
  int inner_batch;
  int rows;
  int cols;
  int width;            ///< 4 if each row of w is aligned to 16 bytes and each of u to 8; else 1
  Divisor units_a_row;  ///< of `width` entries, the last one perhaps of fewer
  float scale;
};

inline constexpr int kMoveWeightsThreads = 256;

/// x <- factor x, rounded once; a factor for each matrix.
///
/// Grid: (blocks of kMultiplyThreads kMultiplyEights eights, batch).
struct MultiplyParameters {
  std::uint16_t* x;      ///< [batch][num_eights][8], aligned to 16 bytes
  const float* factors;  ///< [batch], factor_stride words apart
  std::int64_t factor_stride;
  int num_eights;
};

inline constexpr int kMultiplyThreads = 256;
inline constexpr int kMultiplyEights = 2;  ///< of a thread

/// Words of fp32 that the direction kernels keep of each matrix.
inline constexpr int kMemoWords = 4;
inline constexpr int kMemoGuess = 0;    ///< the scale of x that the next step tries; 0: 1
inline constexpr int kMemoScale = 1;    ///< the scale that x should have
inline constexpr int kMemoTicket = 2;   ///< blocks that have ended, an integer; 0 between kernels
inline constexpr int kMemoInverse = 3;  ///< see DirectionParameters

/// What the momentum and x become: see Direction in direction.h.
///
/// Grid: (num_parts, batch), of the second kernel (blocks_again, batch). Matrix i of gradient and
/// momentum begins at i / inner_batch * batch_stride + i % inner_batch * inner_stride entries.
/// Sizes fit an int, with a part's entries to spare. A part of x is kDirectionThreads
/// kDirectionFours fours, one after the other.
struct DirectionParameters {
  const float* gradient;         ///< [batch][rows][cols]
  float* momentum;               ///< [batch][rows][cols], strides as gradient's
  std::uint16_t* x;              ///< [batch][x_rows][x_cols], in the kernel's 16-bit format
  const float* rest;             ///< 1 - mu
  const float* gradient_factor;  ///< of the gradient; null: 1
  const std::uint8_t* applies;
  float* memo;     ///< [batch][kMemoWords]
  float* squares;  ///< [batch]: the squares of the memos' kMemoInverse; null: they are not wanted
  float* partial;  ///< [batch][num_parts][2]: the parts' sums of squares and largest entries
  std::int64_t row_stride;
  std::int64_t inner_stride;
  std::int64_t batch_stride;
  int inner_batch;
  int rows;
  int cols;
  int x_rows;
  int x_cols;           ///< a multiple of 4
  Divisor fours_a_row;  ///< of x
  int num_parts;
  int blocks_again;  ///< in [1, num_parts]
  float eps;
  bool nesterov;
  bool in_fours;  ///< rows of gradient and momentum are fours, aligned to 16 bytes
};

inline constexpr int kDirectionThreads = 256;
inline constexpr int kDirectionFours = 8;   ///< a thread's of a part, of 4 entries each
inline constexpr int kDirectionBlocks = 4;  ///< of a multiprocessor at a time: registers suffice
inline constexpr int kDirectionSharedWords = 2 * kDirectionThreads / 32 + 1;

/// How a kernel of compute capability 8.0 divides a product.
struct ProductTile {
  int tile;    ///< rows and columns of out that a block computes
  int depth;   ///< entries of `inner` that a block multiplies between two barriers
  int stages;  ///< such steps that lie in shared memory
  int warp_rows;
  int warp_cols;

  constexpr int threads() const { return tile / warp_rows * (tile / warp_cols) * 32; }
  constexpr int shared_bytes() const { return stages * 2 * tile * depth * 2; }
};
inline constexpr ProductTile kProduct80Large{128, 32, 3, 64, 32};
inline constexpr ProductTile kProduct80Small{64, 64, 3, 32, 32};

/// The weights that a full product moves instead of writing `out`:
/// w <- *decay w + (*factor scale scales[b]) product where *applies is not 0; else the kernel does
/// nothing.
///
/// The product is rounded to 16 bits before, and everything else rounds as MoveWeightsParameters
/// say: bits are those of both kernels, one after the other. Matrix i of a launch is matrix
/// first + i of w, which has MoveWeightsParameters' strides.
struct MovedWeights {
  float* w;  ///< [batch][rows][cols]; null: the product is written
  const std::uint8_t* applies;
  const float* scales;  ///< [batch], scale_stride words apart; null: 1
  std::int64_t scale_stride;
  std::int64_t row_stride;  ///< strides in elements
  std::int64_t inner_stride;
  std::int64_t batch_stride;
  int inner_batch;
  int first;
  int rows;       ///< at most m of the product
  int cols;       ///< at most n of the product
  bool in_fours;  ///< four entries from any multiple of 4 on are aligned to 16 bytes
  const float* decay;
  const float* factor;
  float scale;
};

/// out <- alpha scale a b' + beta c + diagonal I: see Product in product.h.
///
/// Grid: (num_tiles splits, batch). Rows of a, b, c and out are aligned to 16 bytes. Sizes and
/// num_tiles splits fit an int, with a block's entries to spare.
struct ProductParameters {
  const std::uint16_t* a;  ///< [batch][m][inner], in the kernel's 16-bit format
  const std::uint16_t* b;  ///< [batch][n][inner]; [batch][inner][n] if b_transposed
  const std::uint16_t* c;  ///< [batch][m][n]; null: 0
  std::uint16_t* out;      ///< [batch][m][n]
  const float* scale;      ///< [batch]; null: 1
  float* partial;  ///< [batch][num_tiles][splits][tile * tile] sums; not used with one split
  std::uint32_t* tickets;  ///< [batch][num_tiles] parts that have ended; 0 between kernels
  std::int64_t a_row_stride;
  std::int64_t a_batch_stride;
  std::int64_t b_row_stride;
  std::int64_t b_batch_stride;
  std::int64_t c_row_stride;
  std::int64_t c_batch_stride;
  std::int64_t out_row_stride;
  std::int64_t out_batch_stride;
  int m;
  int n;  ///< m if the product is symmetric
  int inner;
  int num_tiles;      ///< that are computed
  int splits;         ///< parts of a tile's sums
  bool one_operand;   ///< b is a, in its strides
  bool b_transposed;  ///< read by full80 alone: kernels of 9.0 are for one layout
  float alpha;
  float beta;
  float diagonal;        ///< of a symmetric product
  MovedWeights weights;  ///< of a full product
};

/// A CUtensorMap: where TMA finds an operand, in boxes of kProduct90Depth columns.
struct alignas(64) TensorMap {
  std::uint64_t words[16];
};

inline constexpr int kProduct90Tile = 128;  ///< rows of a block; a cluster of two has 256 x 256
inline constexpr int kProduct90Depth = 64;  ///< entries of `inner` in a step
inline constexpr int kProduct90Stages = 4;  ///< steps that lie in shared memory
inline constexpr int kProduct90Threads = 384;
inline constexpr int kProduct90OperandWords = kProduct90Tile * kProduct90Depth / 2;
inline constexpr int kProduct90StagedWords = kProduct90Tile * kProduct90Tile / 2;
/// The staged tile, the stages with three operands each, two mbarriers a stage, and a word.
inline constexpr int kProduct90SharedWords =
    kProduct90StagedWords + kProduct90Stages * (3 * kProduct90OperandWords + 4) + 2;

/// How the clusters divide a product, see Shares in shares.h.
struct SharesOf {
  int batch;
  int num_tiles;  ///< of a matrix
  int num_whole;  ///< of these, that one cluster computes
  int num_runs;   ///< into which the others are cut, of a matrix
  int num_steps;  ///< of a tile
};

/// As ProductParameters, without splits.
///
/// Grid: (2 clusters, 1), in clusters of two blocks.
struct Product90Parameters {
  ProductParameters product;  ///< partial: [batch][cut tiles][most_parts][2] sums of blocks
  TensorMap a;
  TensorMap b;
  SharesOf shares;
  int most_parts;  ///< of a cut tile
};

}  // namespace dmuon::kernels::cuda
