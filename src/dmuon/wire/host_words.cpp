#include "dmuon/wire/host_words.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace dmuon::wire {

void HostWords::all_reduce_max(const at::Tensor& tensor, watch::Rendezvous kind,
                               const std::string& what) {
  const std::int64_t number = watch_->reach(kind, what);
  for (Group& group : groups_)
    watch_->wait_for(group.all_reduce_max(tensor, what), kind, number, [&] { return what; });
}

std::vector<std::array<std::int64_t, 4>> HostWords::all_gather(std::array<std::int64_t, 4> words,
                                                               watch::Rendezvous kind,
                                                               const std::string& what) {
  const std::int64_t number = watch_->reach(kind, what);
  at::Tensor known = at::empty({1, 4}, at::TensorOptions().dtype(at::kLong));
  std::ranges::copy(words, known.mutable_data_ptr<std::int64_t>());
  for (Group& group : groups_) {
    at::Tensor all = at::empty({group.size(), known.size(0), 4}, known.options());
    watch_->wait_for(group.all_gather(all, known, what), kind, number, [&] { return what; });
    known = all.view({-1, 4});
  }
  std::vector<std::array<std::int64_t, 4>> by_rank(static_cast<std::size_t>(known.size(0)));
  const auto* next = known.const_data_ptr<std::int64_t>();
  for (auto& of_rank : by_rank) {
    std::copy_n(next, of_rank.size(), of_rank.begin());
    next += of_rank.size();
  }
  return by_rank;
}

}  // namespace dmuon::wire
