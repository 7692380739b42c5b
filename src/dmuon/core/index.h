#pragma once

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <ostream>
#include <utility>
#include <vector>

namespace dmuon::core {

/// Names a place in one kind of list. Two kinds do not convert into each other, so the compiler
/// rejects an owner's slot used as a unit. As small as an int; prints as its number.
template <typename Kind>
class Index {
 public:
  constexpr Index() = default;
  template <std::integral Number>
  constexpr explicit Index(Number value) : value_(static_cast<int>(value)) {}

  constexpr int value() const { return value_; }
  constexpr std::size_t position() const { return static_cast<std::size_t>(value_); }
  constexpr auto operator<=>(const Index&) const = default;
  constexpr Index& operator++() {
    ++value_;
    return *this;
  }
  constexpr Index& operator--() {
    --value_;
    return *this;
  }

  friend std::ostream& operator<<(std::ostream& out, Index index) { return out << index.value_; }

 private:
  int value_ = 0;
};

/// The indices 0 ... size - 1, for range-based loops.
template <typename I>
class Indices {
 public:
  template <std::integral Number>
  constexpr explicit Indices(Number size) : end_(size) {}

  class Iterator {
   public:
    constexpr explicit Iterator(I at) : at_(at) {}
    constexpr I operator*() const { return at_; }
    constexpr Iterator& operator++() {
      ++at_;
      return *this;
    }
    constexpr bool operator==(const Iterator&) const = default;

   private:
    I at_;
  };

  constexpr bool contains(I index) const { return index >= I(0) && index < end_; }
  constexpr Iterator begin() const { return Iterator(I(0)); }
  constexpr Iterator end() const { return Iterator(end_); }

 private:
  I end_;
};

/// Returns the indices sorted by rising key, ties by index.
template <typename I, typename Key>
std::vector<I> sorted_by(const Indices<I>& all, const Key& key) {
  std::vector<I> sorted;
  for (const I i : all) sorted.push_back(i);
  std::stable_sort(sorted.begin(), sorted.end(), [&](I a, I b) { return key(a) < key(b); });
  return sorted;
}

/// A std::vector that accepts one kind of index alone.
template <typename I, typename T>
class Vector {
 public:
  using Values = std::vector<T>;

  Vector() = default;
  template <std::integral Number>
  explicit Vector(Number size, const T& value = {})
      : values_(static_cast<std::size_t>(size), value) {}
  explicit Vector(Values values) : values_(std::move(values)) {}
  Vector(std::initializer_list<T> values) : values_(values) {}

  /// Unchecked.
  typename Values::reference operator[](I index) { return values_[index.position()]; }
  typename Values::const_reference operator[](I index) const { return values_[index.position()]; }

  /// @throws std::out_of_range.
  typename Values::reference at(I index) { return values_.at(index.position()); }
  typename Values::const_reference at(I index) const { return values_.at(index.position()); }

  int size() const { return static_cast<int>(values_.size()); }
  bool empty() const { return values_.empty(); }
  bool contains(I index) const { return indices().contains(index); }
  Indices<I> indices() const { return Indices<I>(values_.size()); }

  auto begin() { return values_.begin(); }
  auto end() { return values_.end(); }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  decltype(auto) front() const { return values_.front(); }
  decltype(auto) back() { return values_.back(); }
  decltype(auto) back() const { return values_.back(); }

  I push_back(T value) {
    values_.push_back(std::move(value));
    return I(values_.size() - 1);
  }
  template <typename... Parts>
  T& emplace_back(Parts&&... parts) {
    return values_.emplace_back(std::forward<Parts>(parts)...);
  }
  void pop_back() { values_.pop_back(); }
  void reserve(std::size_t size) { values_.reserve(size); }
  template <std::integral Number>
  void resize(Number size, const T& value = {}) {
    values_.resize(static_cast<std::size_t>(size), value);
  }

  /// Returns the plain vector, for code that does not know the index, such as bindings.
  const Values& values() const { return values_; }

  bool operator==(const Vector&) const = default;

 private:
  Values values_;
};

// The kinds that several modules share; docs/architecture.md has their meaning.
using ParameterIndex = Index<struct ParameterKind>;  ///< in module order
using LeafIndex = Index<struct LeafKind>;            ///< likewise
using UnitIndex = Index<struct UnitKind>;            ///< likewise
using BatchIndex = Index<struct BatchKind>;          ///< of one rank
using Slot = Index<struct SlotKind>;                 ///< replicate * num_shards + shard
using Replicate = Index<struct ReplicateKind>;
using Shard = Index<struct ShardKind>;       ///< a column's number
using Owner = Index<struct OwnerKind>;       ///< slot * tensor_parallel + rank of the slot's group
using ShapeIndex = Index<struct ShapeKind>;  ///< by first appearance in the inventory

template <typename T>
using PerParameter = Vector<ParameterIndex, T>;
template <typename T>
using PerShard = Vector<Shard, T>;
template <typename T>
using PerOwner = Vector<Owner, T>;
template <typename T>
using PerShape = Vector<ShapeIndex, T>;

}  // namespace dmuon::core
