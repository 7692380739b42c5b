#include "dmuon/kernels/cuda/graph.h"

#include <string>

#include "dmuon/core/error.h"
#include "dmuon/kernels/cuda/driver.h"

namespace dmuon::kernels::cuda {
namespace {

void check(Result result, const char* function) {
  if (result != 0)
    throw core::CudaError(core::message("CUDA graph: ", function, ": ", name_of(result)));
}

// A capture, which ends with this object at the latest.
class Capture {
 public:
  explicit Capture(Stream stream) : stream_(stream) {
    check(driver()->begin_capture(stream, kThreadLocalCapture), "cuStreamBeginCapture");
  }
  ~Capture() {
    void* graph = nullptr;
    if (is_open_ && driver()->end_capture(stream_, &graph) == 0 && graph != nullptr)
      driver()->destroy_graph(graph);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  void* end() {
    void* graph = nullptr;
    is_open_ = false;
    check(driver()->end_capture(stream_, &graph), "cuStreamEndCapture");
    return graph;
  }

 private:
  Stream stream_;
  bool is_open_ = true;
};

}  // namespace

Graph::Graph(void* stream, const std::function<void()>& work) {
  if (driver() == nullptr) throw core::CudaError("CUDA graph: " + why_no_driver());
  Capture capture(stream);
  work();
  void* const graph = capture.end();
  const Result result = driver()->instantiate(&executable_, graph, 0);
  driver()->destroy_graph(graph);
  check(result, "cuGraphInstantiate");
}

Graph::~Graph() {
  if (executable_ != nullptr) driver()->destroy_executable(executable_);
}

void Graph::launch(void* stream) const {
  check(driver()->launch_graph(executable_, stream), "cuGraphLaunch");
}

}  // namespace dmuon::kernels::cuda
