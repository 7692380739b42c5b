# Makes the target dmuon_torch from the PyTorch that pytorch.py finds.
#
# Does not use find_package(Torch): with a PyTorch that has CUDA it fails without the CUDA toolkit. PyTorch's own
# packages need no toolkit, and neither does dmuon.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/pytorch.py
  OUTPUT_VARIABLE torch_found COMMAND_ERROR_IS_FATAL ANY)
list(GET torch_found 0 torch_version)
list(GET torch_found 1 TORCH_INSTALL_PREFIX)
message(STATUS "PyTorch ${torch_version} in ${TORCH_INSTALL_PREFIX}")

add_library(dmuon_torch INTERFACE)
# Through a link in the build folder, so that ccache knows PyTorch's headers wherever they are installed, also in the
# environments that pip makes and removes. As system headers: their warnings are not ours.
file(CREATE_LINK ${TORCH_INSTALL_PREFIX} ${CMAKE_BINARY_DIR}/torch SYMBOLIC)
target_include_directories(dmuon_torch SYSTEM INTERFACE
  ${CMAKE_BINARY_DIR}/torch/include ${CMAKE_BINARY_DIR}/torch/include/torch/csrc/api/include)
set(linked_headers $<$<CXX_COMPILER_ID:GNU>:-fno-canonical-system-headers>) # g++ would follow the link
target_compile_options(dmuon_torch INTERFACE ${linked_headers})
foreach(library torch torch_cpu c10 torch_python)
  # Not cached: another environment has another one.
  find_library(${library}_path ${library} PATHS ${TORCH_INSTALL_PREFIX}/lib REQUIRED NO_DEFAULT_PATH NO_CACHE)
endforeach()
target_link_libraries(dmuon_torch INTERFACE ${torch_path} ${torch_cpu_path} ${c10_path})
target_compile_definitions(dmuon_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
set(TORCH_PYTHON_LIBRARY ${torch_python_path})

# PyTorch's pybind11 alone, for bindings below the torch line. Objects of one module pass into the other only if both
# are built with the same pybind11.
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/pybind11)
file(CREATE_LINK ${TORCH_INSTALL_PREFIX}/include/pybind11 ${CMAKE_BINARY_DIR}/pybind11/pybind11 SYMBOLIC)
add_library(dmuon_pybind11 INTERFACE)
target_include_directories(dmuon_pybind11 SYSTEM INTERFACE ${CMAKE_BINARY_DIR}/pybind11)
target_compile_options(dmuon_pybind11 INTERFACE ${linked_headers})
