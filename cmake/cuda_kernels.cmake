# Device code without CMake's language CUDA, which needs a toolkit's folders. For each .cu file nvcc makes one cubin an
# architecture, `fatbinary` puts the cubins together, and the assembler puts the fat binary into an object file.
#
# Sets DMUON_NVCC to nvcc's path (cmake/nvcc.py), or to nothing: then dmuon is built without CUDA kernels, and
# DMUON_WHY_NO_KERNELS says why. With DMUON_OLDER_PTXAS drivers of CUDA 12 load the cubins too, of the architectures
# that CUDA 12 had from its beginning.

# The compute capabilities that cubins are made for. A cubin runs on later minor versions too: 86 on 89, for which ptxas
# makes the same instructions, and 100 on 103.
set(DMUON_CUDA_ARCHITECTURES 80 86 90 100 120)

# Sets `out` to commands, each after the word COMMAND, that make a cubin and <cubin>.d: dmuon_cubin(<out> <architecture>
# <source> <cubin> <options of nvcc>...). The cubin's name is relative, so that ccache knows the command in other folders.
function(dmuon_cubin out number source cubin)
  set(nvcc COMMAND ${nvcc_launcher} ${DMUON_NVCC} -c) # without -c ccache takes nvcc for a linker
  set(options -std=c++20 -O3 -ccbin ${CMAKE_CXX_COMPILER} ${ARGN} -MD -MF ${cubin}.d -MT ${cubin} ${source})
  set(commands ${nvcc} -cubin -gencode=arch=compute_${number},code=sm_${number} ${options} -o ${cubin})
  string(REGEX REPLACE "a$" "" capability ${number})
  if(DMUON_OLDER_PTXAS AND capability LESS 100)
    # PTX of CUDA 13 that says to be 12.9's.
    set(commands ${nvcc} -ptx -arch=compute_${number} ${options} -o ${cubin}.ptx
                 COMMAND sed -i "s/^[.]version .*/.version 8.7/" ${cubin}.ptx
                 COMMAND ${strict_nvcc} ${DMUON_OLDER_PTXAS} -O3 -arch=sm_${number} ${strict_ptxas}
                         -o ${cubin} ${cubin}.ptx)
  endif()
  set(${out} ${commands} PARENT_SCOPE)
endfunction()

# Sets `out` to the command that puts cubins, <architecture>=<cubin>, into a fat binary. Not compressed: a wheel
# compresses it, and the tests' driver reads it.
function(dmuon_fatbin out fatbin)
  list(TRANSFORM ARGN REPLACE "^([0-9]+a?)=(.*)" "--image3=kind=elf,sm=\\1,file=\\2")
  set(${out} COMMAND ${DMUON_FATBINARY} -64 --compress=false ${ARGN} --create=${fatbin} PARENT_SCOPE)
endfunction()

# Makes a fat binary of the oldest and the newest architecture. Sets `failure` to what failed, or to nothing.
function(dmuon_probe_nvcc failure)
  set(probe nvcc_probe)
  file(WRITE ${CMAKE_BINARY_DIR}/${probe}.cu "#include <cstdint>\nextern \"C\" __global__ void probe(std::uint32_t* p) { *p = 0; }\n")
  list(GET DMUON_CUDA_ARCHITECTURES 0 oldest)
  list(GET DMUON_CUDA_ARCHITECTURES -1 newest)
  dmuon_cubin(first ${oldest} ${probe}.cu ${probe}.${oldest})
  dmuon_cubin(last ${newest} ${probe}.cu ${probe}.${newest})
  dmuon_fatbin(both ${probe}.fatbin ${oldest}=${probe}.${oldest} ${newest}=${probe}.${newest})
  set(command "")
  foreach(word IN LISTS first last both ITEMS COMMAND)
    if(NOT word STREQUAL COMMAND)
      list(APPEND command ${word})
    elseif(command)
      execute_process(COMMAND ${command} WORKING_DIRECTORY ${CMAKE_BINARY_DIR} RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
      if(failed)
        list(JOIN command " " command)
        string(STRIP "${command}: ${failed} ${said}" said)
        set(${failure} "${said}" PARENT_SCOPE)
        return()
      endif()
      set(command "")
    endif()
  endforeach()
  set(${failure} "" PARENT_SCOPE)
endfunction()

# A toolchain that does not work is as good as none: an install must not fail by it.
function(dmuon_find_nvcc)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  # At each configuration, because tools/setup may have installed it since.
  execute_process(COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/nvcc.py OUTPUT_VARIABLE found
                  COMMAND_ERROR_IS_FATAL ANY)
  list(GET found 0 DMUON_NVCC)
  list(GET found 1 DMUON_OLDER_PTXAS)
  get_filename_component(bin "${DMUON_NVCC}" REALPATH)
  get_filename_component(bin "${bin}" DIRECTORY)
  find_program(DMUON_FATBINARY fatbinary HINTS ${bin} NO_CACHE)
  set(why "")
  if("$ENV{NVCC}" STREQUAL none)
    set(why "the build was given NVCC=none")
  elseif(NOT DMUON_NVCC)
    set(why "nvcc was not found")
  elseif(NOT DMUON_FATBINARY)
    set(why "nvcc was found without fatbinary")
  else()
    dmuon_probe_nvcc(failure)
    if(failure AND DMUON_OLDER_PTXAS)
      message(STATUS "CUDA kernels without the older ptxas: ${failure}")
      set(DMUON_OLDER_PTXAS "")
      dmuon_probe_nvcc(failure)
    endif()
    if(failure)
      message(STATUS "${failure}")
      set(why "nvcc did not work: it must be of CUDA 12.8 or later and know the C++ compiler") # a ; would end a list's item
    endif()
  endif()
  if(why)
    message(STATUS "dmuon is built without CUDA kernels, and without their tests: ${why}")
    set(DMUON_NVCC "")
  else()
    message(STATUS "CUDA kernels by ${DMUON_NVCC} ${DMUON_OLDER_PTXAS}")
  endif()
  set(DMUON_WHY_NO_KERNELS "${why}" PARENT_SCOPE)
  foreach(name DMUON_NVCC DMUON_OLDER_PTXAS DMUON_FATBINARY)
    set(${name} "${${name}}" PARENT_SCOPE)
  endforeach()
endfunction()
dmuon_find_nvcc()

# Adds the kernels of sources to a target: dmuon_cuda_kernels(<target> SOURCES <file.cu>... OPTIONS <of nvcc>...).
# A source is <file.cu>:<architecture> if it is for one alone, such as 90a.
# The target's code finds the fat binary of cuda/name.cu as `dmuon_cuda_name`.
function(dmuon_cuda_kernels target)
  cmake_parse_arguments(ARG "" "" "SOURCES;OPTIONS" ${ARGN})
  set(strict "")
  if(CMAKE_COMPILE_WARNING_AS_ERROR) # as for C++: an install never fails by what a newer nvcc warns of
    set(strict --Werror all-warnings -Xptxas -warn-spills,-warn-lmem-usage,-Werror)
    set(strict_ptxas -warn-spills -warn-lmem-usage -Werror)
    set(strict_nvcc ${PROJECT_SOURCE_DIR}/cmake/strict_nvcc)
  endif()
  set(assembly "")
  set(fatbins "")
  foreach(source IN LISTS ARG_SOURCES)
    set(architectures ${DMUON_CUDA_ARCHITECTURES})
    if(source MATCHES "(.*):(.*)")
      set(source ${CMAKE_MATCH_1})
      set(architectures ${CMAKE_MATCH_2})
    endif()
    get_filename_component(name ${source} NAME_WE)
    set(images "")
    set(cubins "")
    set(nvcc_launcher ${strict_nvcc} ${CMAKE_CXX_COMPILER_LAUNCHER})
    foreach(number IN LISTS architectures)
      set(cubin ${name}.sm_${number}.cubin)
      dmuon_cubin(commands ${number} ${CMAKE_CURRENT_SOURCE_DIR}/${source} ${cubin}
                  ${strict} ${ARG_OPTIONS} -I${PROJECT_SOURCE_DIR}/src)
      add_custom_command(OUTPUT ${cubin} ${commands}
        DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${source} DEPFILE ${cubin}.d VERBATIM COMMENT "nvcc ${name} sm_${number}")
      list(APPEND cubins ${cubin})
      list(APPEND images ${number}=${cubin})
    endforeach()
    set(fatbin ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin)
    dmuon_fatbin(command ${fatbin} ${images})
    add_custom_command(OUTPUT ${fatbin} ${command} DEPENDS ${cubins} VERBATIM COMMENT "fatbinary ${name}")
    list(APPEND fatbins ${fatbin})
    string(APPEND assembly ".section .rodata\n.balign 64\n.globl dmuon_cuda_${name}\n.hidden dmuon_cuda_${name}\n"
                           "dmuon_cuda_${name}:\n.incbin \"${name}.fatbin\"\n")
  endforeach()
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${target}_cuda.o)
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${target}_cuda.S
       CONTENT "${assembly}.section .note.GNU-stack,\"\",@progbits\n")
  add_custom_command(OUTPUT ${object} COMMAND ${CMAKE_CXX_COMPILER} -c ${target}_cuda.S -o ${object}
    WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
    DEPENDS ${fatbins} ${CMAKE_CURRENT_BINARY_DIR}/${target}_cuda.S VERBATIM)
  target_sources(${target} PRIVATE ${object})
  set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  list(JOIN DMUON_CUDA_ARCHITECTURES "," architectures)
  target_compile_definitions(${target} PRIVATE DMUON_CUDA_ARCHITECTURES=${architectures})
  target_link_libraries(${target} PUBLIC ${CMAKE_DL_LIBS})
endfunction()
