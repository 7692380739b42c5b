#pragma once

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "dmuon/core/index.h"
#include "dmuon/schedule/operation.h"

// In Python an index is an int, and a Vector is a list.
namespace pybind11::detail {

template <typename Kind>
struct type_caster<dmuon::core::Index<Kind>> {
  using Index = dmuon::core::Index<Kind>;
  PYBIND11_TYPE_CASTER(Index, const_name("int"));

  bool load(handle source, bool convert) {
    make_caster<int> number;
    if (!number.load(source, convert)) return false;
    value = Index(cast_op<int>(number));
    return true;
  }
  static handle cast(Index index, return_value_policy policy, handle parent) {
    return make_caster<int>::cast(index.value(), policy, parent);
  }
};

template <typename I, typename T>
struct type_caster<dmuon::core::Vector<I, T>> {
  using Vector = dmuon::core::Vector<I, T>;
  using Values = make_caster<std::vector<T>>;
  PYBIND11_TYPE_CASTER(Vector, Values::name);

  bool load(handle source, bool convert) {
    Values values;
    if (!values.load(source, convert)) return false;
    value = Vector(cast_op<std::vector<T>&&>(std::move(values)));
    return true;
  }
  static handle cast(const Vector& vector, return_value_policy policy, handle parent) {
    return Values::cast(vector.values(), policy, parent);
  }
};

/// A subject is ("unit", index) or ("batch", index).
template <>
struct type_caster<dmuon::schedule::Subject> {
  PYBIND11_TYPE_CASTER(dmuon::schedule::Subject, const_name("tuple[str, int]"));

  static handle cast(const dmuon::schedule::Subject& subject, return_value_policy policy,
                     handle parent) {
    const auto* unit = std::get_if<dmuon::core::UnitIndex>(&subject);
    const int index =
        unit != nullptr ? unit->value() : std::get<dmuon::core::BatchIndex>(subject).value();
    const std::pair<std::string, int> named(unit != nullptr ? "unit" : "batch", index);
    return make_caster<std::pair<std::string, int>>::cast(named, policy, parent);
  }
};

}  // namespace pybind11::detail
