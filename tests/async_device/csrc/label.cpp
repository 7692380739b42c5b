#include "async_device/csrc/label.h"

#include <Python.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <map>
#include <mutex>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace async_device {
namespace {

constexpr size_t kMaxFrames = 3;

using Frame = std::pair<PyCodeObject*, int>;
using Frames = std::array<Frame, kMaxFrames>;

/// Places by number. Code objects in it are never freed, so that their addresses stay theirs.
struct Places {
  std::mutex mutex;
  std::vector<std::string> texts{"no Python line"};
  std::map<Frames, uint32_t> by_frames;
  std::unordered_map<std::type_index, uint32_t> by_node;
};

Places& places() {
  static auto* places = new Places();
  return *places;
}

std::string file_name(PyCodeObject* code) {
  const char* name = PyUnicode_AsUTF8(code->co_filename);
  return name == nullptr ? "" : name;
}

/// True if a frame is PyTorch's or this package's. Needs the GIL.
bool is_internal(PyCodeObject* code) {
  static std::unordered_map<PyCodeObject*, bool> known;
  const auto [found, is_new] = known.try_emplace(code, false);
  if (is_new) {
    Py_INCREF(code);
    const std::string file = file_name(code);
    found->second = file.find("/torch/") != std::string::npos || file.front() == '<' ||
                    file.find("/async_device/async_device/") != std::string::npos;
  }
  return found->second;
}

std::string text_of(const Frames& frames) {
  std::string text;
  for (const auto& [code, line] : frames) {
    if (code == nullptr) break;
    const std::string file = file_name(code);
    text += (text.empty() ? "" : " < ") + file.substr(file.rfind('/') + 1) + ":" +
            std::to_string(line) + " " + PyUnicode_AsUTF8(code->co_name);
  }
  return text;
}

/// Needs the GIL. Returns 0 if there is no line of the user's.
uint32_t python_place() {
  Frames frames{};
  size_t num_frames = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && num_frames < kMaxFrames) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!is_internal(code)) frames[num_frames++] = {code, PyFrame_GetLineNumber(frame)};
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  if (num_frames == 0) return 0;
  const std::scoped_lock lock(places().mutex);
  const auto [found, is_new] = places().by_frames.try_emplace(frames, places().texts.size());
  if (is_new) places().texts.push_back(text_of(frames));
  return found->second;
}

uint32_t autograd_place() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return 0;
  const torch::autograd::Node& known = *node;
  const std::scoped_lock lock(places().mutex);
  const auto [found, is_new] =
      places().by_node.try_emplace(std::type_index(typeid(known)), places().texts.size());
  if (is_new) places().texts.push_back("backward of " + known.name());
  return found->second;
}

}  // namespace

const std::string* interned(const std::string& text) {
  static std::mutex mutex;
  static auto* texts = new std::unordered_set<std::string>();
  const std::scoped_lock lock(mutex);
  return &*texts->insert(text).first;
}

uint32_t current_place() {
  uint32_t place = 0;
  if (Py_IsInitialized() != 0) {
    if (PyGILState_Check() != 0) {
      place = python_place();
    } else if (PyGILState_GetThisThreadState() != nullptr) {
      const PyGILState_STATE state = PyGILState_Ensure();
      place = python_place();
      PyGILState_Release(state);
    }
  }
  return place != 0 ? place : autograd_place();
}

std::string describe(const Label& label) {
  std::string text = "'" + *label.operation;
  if (label.number != 0) text += " #" + std::to_string(label.number);
  const std::scoped_lock lock(places().mutex);
  return text + "' (" + places().texts.at(label.place) + ")";
}

}  // namespace async_device
