#include "async_device/csrc/operator_facts.h"

#include <ATen/core/enum_tag.h>

#include <mutex>
#include <unordered_map>

#include "async_device/csrc/label.h"

namespace async_device {
namespace {

int returned_argument(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) return OperatorFacts::kFresh;
  int found = OperatorFacts::kFresh;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->beforeSet() == result.alias_info()->beforeSet()) {
      found = static_cast<int>(i);
    }
  }
  return found;
}

bool is_tensors(const c10::Argument& result) {
  const auto kind = result.type()->kind();
  return kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
}

OperatorFacts make_facts(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  const std::string name = c10::toString(schema.operator_name());
  OperatorFacts facts{interned(name), {}, {}};
  bool writes = false;
  for (const c10::Argument& argument : schema.arguments()) {
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    const bool is_generator = argument.type()->str().find("Generator") != std::string::npos;
    facts.arguments.push_back({is_written, argument.is_out(), is_generator});
    writes |= is_written;
    facts.has_out |= argument.is_out();
  }
  for (const c10::Argument& result : schema.returns()) {
    const auto* alias = result.alias_info();
    facts.is_view |= alias != nullptr && !alias->isWrite() && !writes;
    facts.returned.push_back(returned_argument(schema, result));
    facts.has_fresh |= facts.returned.back() == OperatorFacts::kFresh;
    facts.needs_values |= !is_tensors(result);
  }
  facts.needs_values |=
      handle.hasTag(at::Tag::data_dependent_output) || handle.hasTag(at::Tag::dynamic_output_shape);
  // Shapes alone decide which kernel of attention runs.
  facts.blocks_gpu_host = facts.needs_values && name != "aten::_fused_sdp_choice";
  return facts;
}

}  // namespace

const OperatorFacts& facts_of(const c10::OperatorHandle& handle) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const c10::FunctionSchema*, OperatorFacts>();
  const std::scoped_lock lock(mutex);
  const auto found = known->find(&handle.schema());
  if (found != known->end()) return found->second;
  return known->emplace(&handle.schema(), make_facts(handle)).first->second;
}

}  // namespace async_device
