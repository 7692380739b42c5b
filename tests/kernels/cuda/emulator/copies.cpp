#include "tests/kernels/cuda/emulator/copies.h"

#include <cstring>
#include <string>

namespace dmuon::kernels::cuda::emulator {
namespace {

constexpr int kWords = static_cast<int>(kCopiedBytes / 4);

}  // namespace

void Copies::start(int word, const char* source, std::size_t bytes, SharedMemory& shared,
                   const Now& now, Site site) {
  shared.check_aligned(word, kWords, site);
  for (int i = 0; i < kWords; ++i) shared.begin_copy(word + i, now, site);
  all_.push_back({word, source, bytes, groups_});
}

void Copies::wait(int pending, SharedMemory& shared, const Now& now) {
  auto copy = all_.begin();
  for (; copy != all_.end() && copy->group < groups_ - pending; ++copy) {
    std::uint32_t words[kWords] = {};
    std::memcpy(words, copy->source, copy->bytes);
    for (int i = 0; i < kWords; ++i) shared.end_copy(copy->word + i, words[i], now.moment);
  }
  all_.erase(all_.begin(), copy);
}

}  // namespace dmuon::kernels::cuda::emulator
