#include <algorithm>

#include "tests/kernels/cuda/emulator/launch.h"

// What the threads of a launch read and write.
namespace dmuon::kernels::cuda::emulator {

void Launch::wait_for_kernel_before() {
  waited_.push_back(now().moment);
  me().has_waited = true;
}

void Launch::check_has_waited(Site site) {
  Thread& own = me();
  if (!grid_.begins_early || own.has_waited) return;
  own.has_waited = true;  // or it is reported once
  const Now reader = now();
  if (std::ranges::none_of(waited_, [&](const Moment& one) { return reader.knows(one); }))
    report(site, "global memory is touched before the kernel in front has ended");
}

const void* Launch::read(const void* address, std::size_t bytes, Site site) {
  static constexpr char kZeros[16] = {};
  check_has_waited(site);
  if (!global_.read(address, bytes, now(), site)) return kZeros;
  return static_cast<const char*>(address) + to_host_;
}

void* Launch::write(void* address, std::size_t bytes, Site site) {
  static char nowhere[16];
  check_has_waited(site);
  if (!global_.write(address, bytes, now(), site)) return nowhere;
  return static_cast<char*>(address) + to_host_;
}

void Launch::copy_async(int word, const void* source, int bytes, Site site) {
  check_has_waited(site);
  const auto size = static_cast<std::size_t>(bytes);
  if (size > kCopiedBytes) return report(site, "a copy reads 0 to 16 bytes");
  if (bytes > 0 && !global_.read(source, size, now(), site, kCopiedBytes)) return;
  me().copies.start(word, static_cast<const char*>(source) + to_host_, size, shared(), now(), site);
}

void Launch::copy_tile(int word, const TensorMap& map, int mbarrier, const TileAt& at, bool to_both,
                       Site site) {
  check_has_waited(site);
  if (to_both && grid_.cluster == 1) return report(site, "the block is in no cluster of two");
  const int first = to_both ? 0 : rank();
  const int last = to_both ? static_cast<int>(grid_.cluster) : rank() + 1;
  for (int block = first; block < last; ++block) {
    const auto copy = tiles_.begin(word, map, mbarrier, at, block, rank(), now(), site);
    if (!copy) return;
    note_sent(block, *copy, site);
  }
}

}  // namespace dmuon::kernels::cuda::emulator
