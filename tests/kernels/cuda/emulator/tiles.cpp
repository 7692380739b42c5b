#include "tests/kernels/cuda/emulator/tiles.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace dmuon::kernels::cuda::emulator {
namespace {

constexpr int kCols = 64;  // of a tile
constexpr int kChunks = 8;
constexpr int kTileWords = 256;  // what a tile is aligned to

static_assert(sizeof(TiledMap) <= sizeof(TensorMap));

// The bytes of a tile's row that lie in the matrix, and where. Null if none do.
struct Source {
  const char* address;
  std::size_t bytes;
};
Source source_of(const TiledMap& map, const TileAt& at, int row) {
  const auto inside = [](int i, std::uint64_t size) {
    return i >= 0 && static_cast<std::uint64_t>(i) < size;
  };
  if (!inside(at.matrix, map.batch) || !inside(at.row + row, map.rows) || !inside(at.col, map.cols))
    return {nullptr, 0};
  const auto col = static_cast<std::uint64_t>(at.col);
  return {map.base + static_cast<std::uint64_t>(at.matrix) * map.batch_pitch +
              static_cast<std::uint64_t>(at.row + row) * map.row_pitch + col * 2,
          2 * std::min<std::uint64_t>(kCols, map.cols - col)};
}

}  // namespace

TensorMap TiledMap::encoded() const {
  TensorMap map{};
  std::memcpy(&map, this, sizeof *this);
  return map;
}

std::optional<TiledMap> Tiles::decode(const TensorMap& map, Site site) const {
  TiledMap decoded;
  std::memcpy(static_cast<void*>(&decoded), &map, sizeof decoded);
  const bool aligned = reinterpret_cast<std::uintptr_t>(&map) % 64 == 0;
  if (aligned && decoded.mark == TiledMap::kMark) return decoded;
  report_.error(site, aligned ? "this is no tensor map" : "a tensor map is aligned to 64 bytes");
  return std::nullopt;
}

bool Tiles::check_source(const TiledMap& map, const TileAt& at, const Now& now, Site site) {
  if (at.col < 0 || at.row < 0 || at.matrix < 0) {
    report_.error(site, "a tile begins before its matrix");
    return false;
  }
  for (int row = 0; row < static_cast<int>(map.tile_rows); ++row) {
    const Source source = source_of(map, at, row);
    if (source.bytes > 0 && !global_.read(source.address, source.bytes, now, site, 2)) return false;
  }
  return true;
}

std::optional<Moment> Tiles::begin(int word, const TensorMap& map, int mbarrier, const TileAt& at,
                                   int block, int user, const Now& now, Site site) {
  const auto decoded = decode(map, site);
  if (!decoded || !check_source(*decoded, at, now, site)) return std::nullopt;
  SharedMemory& shared = shared_[static_cast<std::size_t>(block)];
  shared.check_aligned(word, kTileWords, site);
  Mbarrier* const counted = mbarriers_.find(block, mbarrier, user, true, now, site);
  if (counted == nullptr) return std::nullopt;
  const Moment moment = mbarriers_.begin_copy(*counted, now.moment.cluster);
  const int words = static_cast<int>(decoded->tile_rows) * kChunks * 4;
  for (int i = 0; i < words && shared.begin_tile(word + i, moment, now, site);) ++i;
  all_.push_back({block, word, *decoded, at, counted, moment, site});
  return moment;
}

void Tiles::end(std::size_t which) {
  const Copy copy = all_[which];
  all_.erase(all_.begin() + static_cast<std::ptrdiff_t>(which));
  SharedMemory& shared = shared_[static_cast<std::size_t>(copy.block)];
  const int rows = static_cast<int>(copy.map.tile_rows);
  for (int row = 0; row < rows; ++row) {
    std::uint32_t words[kChunks * 4] = {};  // zeros beyond the matrix
    const Source source = source_of(copy.map, copy.at, row);
    if (source.bytes > 0) std::memcpy(words, source.address + to_host_, source.bytes);
    for (int i = 0; i < kChunks * 4; ++i)
      shared.end_tile(word_of_chunk(copy.word, row, i / 4) + i % 4, words[i]);
  }
  const auto bytes = static_cast<std::uint32_t>(rows) * kCols * 2;
  mbarriers_.end_copy(*copy.mbarrier, bytes, copy.moment, copy.site);
}

}  // namespace dmuon::kernels::cuda::emulator
