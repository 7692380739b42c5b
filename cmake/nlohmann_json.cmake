# Finds the target nlohmann_json::nlohmann_json: the system's, or the one of PyPI's nlohmann-json, which pytorch.py
# requires for an install with pip if the system has none.
find_package(nlohmann_json 3.10 QUIET)
if(nlohmann_json_FOUND)
  return()
endif()
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "
import importlib.util
print(*importlib.util.find_spec('nlohmann_json').submodule_search_locations, sep=';', end='')"
  OUTPUT_VARIABLE nlohmann_json_folder ERROR_QUIET RESULT_VARIABLE nlohmann_json_missing)
if(nlohmann_json_missing)
  message(FATAL_ERROR "dmuon needs the headers of nlohmann-json >= 3.10 to build: apt-get install nlohmann-json3-dev, "
                      "or pip install nlohmann-json")
endif()
# Includes the headers by a link, as PyTorch's.
file(CREATE_LINK ${nlohmann_json_folder} ${CMAKE_BINARY_DIR}/nlohmann_json SYMBOLIC)
add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
target_include_directories(nlohmann_json::nlohmann_json SYSTEM INTERFACE ${CMAKE_BINARY_DIR}/nlohmann_json/include)
