#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dmuon/kernels/cuda/parameters.h"
#include "tests/kernels/cuda/emulator/mbarriers.h"
#include "tests/kernels/cuda/emulator/memory.h"

namespace dmuon::kernels::cuda::emulator {

/// What the fake driver writes into a TensorMap: matrices of 16-bit entries, of which a copy takes
/// a tile. A tile's row of 64 entries, 128 bytes, is 8 chunks. Chunk c of row r lies in place c ^ r
/// % 8 of the row, in tiles that are aligned to 1024 bytes.
struct TiledMap {
  static constexpr std::uint64_t kMark = 0x70616d646c6974;

  std::uint64_t mark = kMark;
  const char* base = nullptr;
  std::uint64_t cols = 0;
  std::uint64_t rows = 0;
  std::uint64_t batch = 1;
  std::uint64_t row_pitch = 0;  ///< bytes
  std::uint64_t batch_pitch = 0;
  std::uint64_t tile_rows = 0;  ///< at most 256

  TensorMap encoded() const;
};

struct TileAt {
  int col, row, matrix;
};

/// The copies of tiles that are in flight in a cluster.
class Tiles {
 public:
  Tiles(const Report& report, GlobalMemory& global, std::vector<SharedMemory>& shared,
        Mbarriers& mbarriers, std::ptrdiff_t to_host)
      : report_(report),
        global_(global),
        shared_(shared),
        mbarriers_(mbarriers),
        to_host_(to_host) {}

  void reset() { all_.clear(); }
  /// Begins a copy to a block of the cluster, which block `user` asks for. Returns nothing after a
  /// report.
  std::optional<Moment> begin(int word, const TensorMap& map, int mbarrier, const TileAt& at,
                              int block, int user, const Now& now, Site site);
  std::size_t in_flight() const { return all_.size(); }
  /// Ends a copy, in any order.
  void end(std::size_t which);
  int block_of(std::size_t which) const { return all_[which].block; }
  Site site_of(std::size_t which) const { return all_[which].site; }

 private:
  struct Copy {
    int block;
    int word;
    TiledMap map;
    TileAt at;
    Mbarrier* mbarrier;
    Moment moment;
    Site site;
  };
  std::optional<TiledMap> decode(const TensorMap& map, Site site) const;
  /// Reports what the copy must not read.
  bool check_source(const TiledMap& map, const TileAt& at, const Now& now, Site site);

  const Report& report_;
  GlobalMemory& global_;
  std::vector<SharedMemory>& shared_;
  Mbarriers& mbarriers_;
  std::ptrdiff_t to_host_;
  std::vector<Copy> all_;
};

/// The word where `chunk` of `row` lies in a tile that begins at `word`.
inline int word_of_chunk(int word, int row, int chunk) {
  return word + row * 32 + (chunk ^ (row % 8)) * 4;
}

}  // namespace dmuon::kernels::cuda::emulator
