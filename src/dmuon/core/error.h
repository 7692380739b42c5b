#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dmuon::core {

/// The input is bad, and the caller can mend it. Python sees a ValueError.
/// The message names the function, the argument (with the parameter's fully
/// qualified name), the expected value and the given one.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// The network or a peer failed. Python sees a RuntimeError.
struct CommError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A CUDA driver refused a call. Python sees a RuntimeError.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// An invariant is broken: a bug in dmuon. Python sees a RuntimeError.
struct InternalError : std::logic_error {
  using std::logic_error::logic_error;
};

/// Streams the parts one after the other into a string.
template <typename... Parts>
std::string message(Parts&&... parts) {
  std::ostringstream out;
  (out << ... << std::forward<Parts>(parts));
  return out.str();
}

/// Returns "a, b, c".
inline std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : ", ") + word;
  return all;
}

/// @throws InvalidArgument with the streamed parts.
template <typename... Parts>
[[noreturn]] void refuse(Parts&&... parts) {
  throw InvalidArgument(message(std::forward<Parts>(parts)...));
}

/// Marks code that is never reached. @throws InternalError with the streamed parts.
template <typename... Parts>
[[noreturn]] void bug(Parts&&... parts) {
  throw InternalError(message("dmuon bug: ", std::forward<Parts>(parts)...));
}

/// @throws InvalidArgument with the streamed parts unless `condition` holds.
template <typename... Parts>
void require(bool condition, Parts&&... parts) {
  if (!condition) refuse(std::forward<Parts>(parts)...);
}

/// @throws InternalError with the streamed parts unless `condition` holds.
template <typename... Parts>
void invariant(bool condition, Parts&&... parts) {
  if (!condition) bug(std::forward<Parts>(parts)...);
}

}  // namespace dmuon::core
