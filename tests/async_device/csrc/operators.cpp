// Every operator that is not geometry or a copy: shapes from the meta device at once, values from
// the CPU's kernel, on the same memory, when the stream comes to it.
#include "async_device/csrc/operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <utility>

#include "async_device/csrc/generator.h"
#include "async_device/csrc/operator_facts.h"
#include "async_device/csrc/settings.h"
#include "async_device/csrc/shape_inference.h"
#include "async_device/csrc/statistics.h"
#include "async_device/csrc/tensors.h"

namespace async_device {
namespace {

/// New tensors of a kernel, and where their values belong.
struct Destination {
  size_t result;
  std::vector<at::Tensor> aliases;
};

/// True for the lists that CUDA's operators take from the host: indices, and scalars of addcmul.
bool may_be_of_host(const OperatorFacts& facts, size_t argument) {
  const std::string& name = *facts.name;
  const bool indexes = name.rfind("aten::index.", 0) == 0 || name == "aten::index" ||
                       name.rfind("aten::index_put", 0) == 0 ||
                       name.rfind("aten::_index_put_impl", 0) == 0;
  return (indexes && argument == 1) || (name.rfind("aten::_foreach_addc", 0) == 0 && argument == 3);
}

/// As CUDA's operators do, which read tensors of the host without dimensions.
void refuse_host_tensors(const OperatorFacts& facts, const Stack& arguments, c10::Device device) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (may_be_of_host(facts, i)) continue;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cpu() &&
          (tensor.dim() > 0 || facts.arguments[i].is_written))
        raise(*facts.name + " got tensors of " + device.str() + " and of the host");
    });
  }
}

/// Returns the device of all tensors, otherwise of a device argument, otherwise the current one.
c10::Device device_of(const OperatorFacts& facts, const Stack& arguments) {
  c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(current_device()));
  bool is_found = false;
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice() && !is_found) device = argument.toDevice();
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!is_on_device(tensor)) return;
      if (is_found && tensor.device() != device) {
        raise(*facts.name + " got tensors of " + device.str() + " and " + tensor.device().str());
      }
      device = tensor.device();
      is_found = true;
    });
  }
  if (is_found) refuse_host_tensors(facts, arguments, device);
  return device;
}

/// A tensor of the host, as it is when the operator is issued.
at::Tensor snapshot(const at::Tensor& tensor) {
  at::Tensor copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

/// Seeded when the operator is issued.
at::Generator seeded_generator(const c10::IValue& given) {
  at::Generator from =
      given.isGenerator() ? given.toGenerator() : default_generator(current_device());
  auto* generator = static_cast<at::CPUGeneratorImpl*>(from.unsafeGetGeneratorImpl());
  const std::scoped_lock lock(generator->mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(generator->random64());
}

Stack kernel_arguments(const OperatorFacts& facts, const Stack& arguments) {
  Stack mapped = map_arguments(arguments, c10::kCPU, [](const at::Tensor& tensor) {
    return is_on_device(tensor) ? host_alias(tensor) : snapshot(tensor);
  });
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (facts.arguments[i].is_generator) mapped[i] = seeded_generator(arguments[i]);
  }
  return mapped;
}

std::vector<Use> uses_of(const OperatorFacts& facts, const Stack& arguments) {
  std::vector<Use> uses;
  for (size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      add_use(uses, tensor, facts.arguments[i].is_written);
    });
  }
  return uses;
}

Stack make_views(const at::Tensor& self, const Inferred& inferred) {
  Stack results;
  for (const c10::IValue& result : inferred.results) {
    results.push_back(map_tensors(result, [&](const at::Tensor& meta) {
      return make_view(self, meta.scalar_type(), meta.sizes(), meta.strides(),
                       meta.storage_offset());
    }));
  }
  return results;
}

/// Gives `out` arguments the sizes of the results.
void resize_outs(const OperatorFacts& facts, const Stack& arguments, const Inferred& inferred) {
  for (const auto& [i, meta] : inferred.outs) {
    const at::Tensor& out = arguments[i].toTensor();
    if (out.sizes() == meta.sizes()) continue;
    if (!is_on_device(out)) raise(*facts.name + " into a tensor of " + out.device().str());
    set_geometry(out, meta.sizes(), meta.strides());
  }
}

/// Makes the host wait and run the kernel itself: shapes or results depend on values, or shapes
/// cannot be known.
Stack run_on_host(const c10::OperatorHandle& handle, const OperatorFacts& facts,
                  const Stack& arguments) {
  Device& device = Device::get();
  if (facts.blocks_gpu_host) {
    device.host_sync(*facts.name);
  } else {
    Statistics::get().count_artificial_sync(*facts.name);
  }
  const std::vector<Use> uses = uses_of(facts, arguments);
  Stack values = kernel_arguments(facts, arguments);
  device.synchronize_stream(device.current_stream(current_device()));
  device.host_access(*facts.name, uses);
  handle.callBoxed(&values);
  Stack results;
  for (size_t i = 0; i < facts.returned.size(); ++i) {
    if (facts.returned[i] == OperatorFacts::kFresh) {
      results.push_back(map_tensors(values[i], [](const at::Tensor& value) {
        at::Tensor result = empty_on_device(value.sizes(), value.strides(), value.scalar_type());
        return copy_from(value, result, true);
      }));
      continue;
    }
    const c10::IValue& given = arguments[static_cast<size_t>(facts.returned[i])];
    if (given.isTensor() && given.toTensor().sizes() != values[i].toTensor().sizes()) {
      set_geometry(given.toTensor(), values[i].toTensor().sizes(), std::nullopt);
      copy_from(values[i].toTensor(), given.toTensor(), true);
    }
    results.push_back(given);
  }
  return results;
}

void run_kernel(const c10::OperatorHandle& handle, const std::string& name, Stack* values) {
  // CPUs have no histogram of integers. Its result is copied to a tensor of integers.
  if (name == "aten::histc") values->at(0) = values->at(0).toTensor().to(at::kDouble);
  handle.callBoxed(values);
}

Stack launch(const c10::OperatorHandle& handle, const OperatorFacts& facts, const Stack& arguments,
             const Inferred& inferred) {
  std::vector<Use> uses = uses_of(facts, arguments);
  Stack results;
  std::vector<Destination> destinations;
  for (size_t i = 0; i < facts.returned.size(); ++i) {
    if (facts.returned[i] != OperatorFacts::kFresh) {
      results.push_back(arguments[static_cast<size_t>(facts.returned[i])]);
      continue;
    }
    destinations.push_back({i, {}});
    results.push_back(map_tensors(inferred.results[i], [&](const at::Tensor& meta) {
      at::Tensor result = empty_on_device(meta.sizes(), meta.strides(), meta.scalar_type());
      add_use(uses, result, true);
      destinations.back().aliases.push_back(host_alias(result));
      return result;
    }));
  }
  Device& device = Device::get();
  Stream* stream = device.current_stream(current_device());
  device.enqueue(stream, {facts.name,
                          [handle, name = facts.name, values = kernel_arguments(facts, arguments),
                           destinations = std::move(destinations)]() mutable {
                            Stack made = std::move(values);
                            run_kernel(handle, *name, &made);
                            for (auto& [result, aliases] : destinations) {
                              size_t next = 0;
                              for_each_tensor(made[result],
                                              [&, &all = aliases](const at::Tensor& value) {
                                                all.at(next++).copy_(value);
                                              });
                            }
                          },
                          std::move(uses)});
  Statistics::get().count_kernel(stream->kind);
  return results;
}

Stack call(const c10::OperatorHandle& handle, const OperatorFacts& facts, const Stack& arguments) {
  if (facts.needs_values) return run_on_host(handle, facts, arguments);
  if (!facts.is_view && !facts.has_fresh && !facts.has_out) {
    return launch(handle, facts, arguments, {});
  }
  const auto inferred = infer_shapes(handle, facts, arguments);
  if (!inferred->is_known) return run_on_host(handle, facts, arguments);
  if (facts.is_view) return make_views(arguments[0].toTensor(), *inferred);
  resize_outs(facts, arguments, *inferred);
  return launch(handle, facts, arguments, *inferred);
}

void call_boxed(const c10::OperatorHandle& handle, Stack* stack) {
  const OperatorFacts& facts = facts_of(handle);
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(facts.arguments.size());
  const Stack arguments(begin, stack->end());
  const c10::DeviceGuard guard(device_of(facts, arguments));
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  Stack results = call(handle, facts, arguments);
  stack->erase(begin, stack->end());
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&call_boxed>());
}

}  // namespace

void prefer_cpu_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten",
                                std::make_optional(c10::DispatchKey::PrivateUse1), __FILE__,
                                __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    const auto handle = c10::Dispatcher::singleton().findOp(name);
    if (!handle || !handle->hasSchema()) continue;
    const auto has = [&](c10::DispatchKey key) { return handle->hasKernelForDispatchKey(key); };
    const bool is_decomposed = has(c10::DispatchKey::CompositeExplicitAutograd) ||
                               has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    // CUDA has one kernel for all tensors of a list.
    const bool is_one = has(c10::DispatchKey::CPU) || name.name.starts_with("aten::_foreach_");
    if (!is_one || !is_decomposed || has(c10::DispatchKey::PrivateUse1)) continue;
    library.impl(c10::toString(name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&call_boxed>());
  }
}

}  // namespace async_device
