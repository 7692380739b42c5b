# Sets `out` to the files to compile for these sources: one file, <name>.cpp in the build folder, that includes them
# all. Most of a compilation is headers, PyTorch's above all. With DMUON_UNITY=OFF, or a single source, `out` is the
# sources.
#
# Not CMake's UNITY_BUILD: the files that it writes hold absolute paths, so ccache would know them in no other clone.
function(dmuon_unite out name)
  list(LENGTH ARGN num_sources)
  if(NOT DMUON_UNITY OR num_sources LESS 2)
    set(${out} ${ARGN} PARENT_SCOPE)
    return()
  endif()
  set(includes "")
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR}/src ${CMAKE_CURRENT_SOURCE_DIR})
  foreach(source IN LISTS ARGN)
    if(IS_ABSOLUTE ${source}) # generated, into the folder of <name>.cpp
      get_filename_component(source ${source} NAME)
    else()
      set(source ${folder}/${source})
    endif()
    string(APPEND includes "#include \"${source}\"\n")
  endforeach()
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp CONTENT "${includes}")
  set(${out} ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp PARENT_SCOPE)
endfunction()

# One folder, one target: dmuon_add_module(<name> SOURCES ... DEPENDS ... [TORCH])
#
# A module without TORCH gets no torch include directory and inherits none. So a torch include
# in it, or in anything it depends on, does not compile: this is the torch line of docs/architecture.md.
function(dmuon_add_module name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS" ${ARGN})
  set(target dmuon_${name})
  dmuon_unite(united ${name} ${ARG_SOURCES})
  add_library(${target} STATIC ${united})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target} PRIVATE dmuon_warnings)
  target_compile_options(${target} PRIVATE -Wsign-conversion)
  foreach(dependency IN LISTS ARG_DEPENDS)
    get_target_property(needs_torch dmuon_${dependency} DMUON_TORCH)
    if(needs_torch AND NOT ARG_TORCH)
      message(FATAL_ERROR "module ${name} is below the torch line and may not depend on ${dependency}")
    endif()
    target_link_libraries(${target} PUBLIC dmuon_${dependency})
  endforeach()
  if(ARG_TORCH)
    target_link_libraries(${target} PUBLIC dmuon_torch)
  endif()
  set_target_properties(${target} PROPERTIES DMUON_TORCH "${ARG_TORCH}" DMUON_SOURCES "${ARG_SOURCES}")
endfunction()

# One test binary a module: dmuon_add_test(<module> <sources>...). If PyTorch's headers are most of the work, it is
# compiled as two files, for two cores.
function(dmuon_add_test module)
  if(NOT DMUON_BUILD_TESTS)
    return()
  endif()
  get_target_property(needs_torch dmuon_${module} DMUON_TORCH)
  if(needs_torch)
    set(turn 0)
    foreach(source IN LISTS ARGN)
      list(APPEND sources_${turn} ${source})
      math(EXPR turn "1 - ${turn}")
    endforeach()
    dmuon_unite(first ${module}_test_1 ${sources_0})
    dmuon_unite(second ${module}_test_2 ${sources_1})
    set(ARGN ${first} ${second})
  endif()
  add_executable(${module}_test ${ARGN})
  target_link_libraries(${module}_test PRIVATE dmuon_${module} dmuon_warnings GTest::gtest_main)
  # GCC 12 takes vectors inside of nested braces, as lists of views have them, for uninitialised.
  target_compile_options(${module}_test PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  # One process a module: starting one that loads PyTorch costs more than most test cases.
  add_test(NAME ${module} COMMAND ${module}_test --gtest_brief=1)
endfunction()
