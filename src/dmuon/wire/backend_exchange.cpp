#include "dmuon/wire/exchange.h"

namespace dmuon::wire {
namespace {

class BackendExchange final : public Exchange {
 public:
  std::int64_t inbox_elements(const Group&, const std::vector<layout::Part>&) const override {
    return 0;
  }

  void reduce(Group& group, const at::Tensor& packed, const std::vector<layout::Part>& parts,
              const at::Tensor& /*inbox*/, const TakeSum& take,
              const std::string& what) const override {
    double scale = 1.0 / group.size();
    if (packed.scalar_type() == at::kHalf && group.size() > 1) {
      packed.mul_(scale);
      scale = 1;
    }
    for_segments(&group, packed, parts, what, [&](const at::Tensor& values, int root) {
      return group.reduce_sum(values, root, what);
    });
    std::int64_t begin = 0;
    for (const layout::Segment& own : parts[static_cast<std::size_t>(group.rank())].segments) {
      take(begin, packed.narrow(0, own.begin, own.size()), scale);
      begin += own.size();
    }
  }
};

}  // namespace

const Exchange& backend_exchange() {
  static const BackendExchange kExchange;
  return kExchange;
}

}  // namespace dmuon::wire
