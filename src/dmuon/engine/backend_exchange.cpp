#include "dmuon/engine/exchange.h"

namespace dmuon::engine {
namespace {

class BackendExchange final : public Exchange {
 public:
  std::int64_t inbox_elements(const Group&, const std::vector<Segment>&) const override {
    return 0;
  }

  void reduce(Group& group, const at::Tensor& packed, const std::vector<Segment>& segments,
              const at::Tensor& /*inbox*/, const TakeSum& take,
              const std::string& what) const override {
    double scale = 1.0 / group.size();
    if (packed.scalar_type() == at::kHalf && group.size() > 1) {
      at::Tensor terms = packed;
      terms.mul_(scale);
      scale = 1;
    }
    for_segments(&group, packed, segments, what, [&](const at::Tensor& part, int root) {
      return group.reduce_sum(part, root, what);
    });
    const Segment own = segments[static_cast<std::size_t>(group.rank())];
    if (own.size() > 0) take(0, packed.narrow(0, own.begin, own.size()), scale);
  }
};

}  // namespace

const Exchange& backend_exchange() {
  static const BackendExchange exchange;
  return exchange;
}

}  // namespace dmuon::engine
