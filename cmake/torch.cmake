# The PyTorch of the interpreter that asked for the build, as the one target dmuon_torch.
#
# Not find_package(Torch): where PyTorch has CUDA, that one fails without the CUDA toolkit, which PyTorch's own
# packages do without, and so do we.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import os, torch; print(torch.__version__, os.path.dirname(torch.__file__), sep=';')"
  OUTPUT_VARIABLE torch_found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
list(GET torch_found 0 torch_version)
list(GET torch_found 1 TORCH_INSTALL_PREFIX)
if(torch_version VERSION_LESS 2.9)
  message(FATAL_ERROR "dmuon needs PyTorch >= 2.9; ${Python_EXECUTABLE} has ${torch_version}")
endif()
message(STATUS "PyTorch ${torch_version} in ${TORCH_INSTALL_PREFIX}")

add_library(dmuon_torch INTERFACE)
# As system headers: their warnings are not ours.
target_include_directories(dmuon_torch SYSTEM INTERFACE
  ${TORCH_INSTALL_PREFIX}/include ${TORCH_INSTALL_PREFIX}/include/torch/csrc/api/include)
foreach(library torch torch_cpu c10 torch_python)
  # Not cached: another environment has another one.
  find_library(${library}_path ${library} PATHS ${TORCH_INSTALL_PREFIX}/lib REQUIRED NO_DEFAULT_PATH NO_CACHE)
endforeach()
target_link_libraries(dmuon_torch INTERFACE ${torch_path} ${torch_cpu_path} ${c10_path})
target_compile_definitions(dmuon_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
set(TORCH_PYTHON_LIBRARY ${torch_python_path})

# PyTorch's pybind11 alone, for bindings below the torch line: objects of one module pass into the other only where
# both are built with the same pybind11.
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/pybind11)
file(CREATE_LINK ${TORCH_INSTALL_PREFIX}/include/pybind11 ${CMAKE_BINARY_DIR}/pybind11/pybind11 SYMBOLIC)
add_library(dmuon_pybind11 INTERFACE)
target_include_directories(dmuon_pybind11 SYSTEM INTERFACE ${CMAKE_BINARY_DIR}/pybind11)
