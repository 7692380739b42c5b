#include "dmuon/optim/rules/make_rule.h"

#include "dmuon/core/named.h"
#include "dmuon/optim/rules/adamuon.h"
#include "dmuon/optim/rules/normuon.h"

namespace dmuon::optim {
namespace {

using RulePtr = std::shared_ptr<const Rule>;

template <typename T>
RulePtr make(const MuonOptions& options) {
  return std::make_shared<T>(options);
}

struct Entry {
  const char* name;
  RulePtr (*make)(const MuonOptions& options);
};

constexpr Entry kRules[] = {
    {"muon", make<Muon>},
    {"normuon", make<NorMuon>},
    {"adamuon", make<AdaMuon>},
};

}  // namespace

RulePtr make_rule(const std::string& name, const MuonOptions& options) {
  return core::named(kRules, name, "Muon: rule: expected", &Entry::name).make(options);
}

}  // namespace dmuon::optim
