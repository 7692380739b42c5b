# The PyTorch of the interpreter that asked for the build, as the one target dmuon_torch.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND ${Python_EXECUTABLE} -c "import torch; print(torch.utils.cmake_prefix_path)"
                OUTPUT_VARIABLE torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
list(APPEND CMAKE_PREFIX_PATH ${torch_prefix})
find_package(Torch 2.9 REQUIRED)
find_library(TORCH_PYTHON_LIBRARY torch_python PATHS ${TORCH_INSTALL_PREFIX}/lib REQUIRED NO_DEFAULT_PATH)

add_library(dmuon_torch INTERFACE)
# As system headers: their warnings are not ours.
target_include_directories(dmuon_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
target_link_libraries(dmuon_torch INTERFACE ${TORCH_LIBRARIES})
target_compile_definitions(dmuon_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
