#include <exception>

#include "dmuon/bindings/topics.h"
#include "dmuon/core/error.h"

namespace dmuon::bindings {

void init_errors() {
  // NOLINTNEXTLINE(performance-unnecessary-value-param): as pybind11 wants it
  pybind11::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const core::InvalidArgument& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const core::CommError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (const core::CudaError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (const core::InternalError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  });
}

}  // namespace dmuon::bindings
