# Device code without CMake's language CUDA, which needs a toolkit's folders. For each .cu file nvcc makes one cubin an
# architecture, `fatbinary` puts the cubins together, and the assembler puts the fat binary into an object file.
#
# Sets DMUON_NVCC to nvcc's path (cmake/nvcc.py), or to nothing: then dmuon is built without CUDA kernels. With
# DMUON_OLDER_PTXAS drivers of CUDA 12 load the cubins too, of the architectures that CUDA 12 had from its beginning.

# The compute capabilities that cubins are made for. A cubin runs on later minor versions too: 80 on 86 and 89.
set(DMUON_CUDA_ARCHITECTURES 80 90 100 120)

function(dmuon_find_nvcc)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  # At each configuration, because tools/setup may have installed it since.
  execute_process(COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/nvcc.py OUTPUT_VARIABLE found
                  COMMAND_ERROR_IS_FATAL ANY)
  list(GET found 0 nvcc)
  list(GET found 1 ptxas)
  set(DMUON_NVCC "" PARENT_SCOPE)
  if(NOT nvcc)
    message(STATUS "No nvcc: dmuon is built without CUDA kernels, and without their tests")
    return()
  endif()
  # An nvcc that is too old, or that refuses this C++ compiler, is as good as none: an install must not fail by it.
  set(probe ${CMAKE_BINARY_DIR}/nvcc_probe)
  file(WRITE ${probe}.cu "#include <cstdint>\nextern \"C\" __global__ void probe(std::uint32_t* p) { *p = 0; }\n")
  list(GET DMUON_CUDA_ARCHITECTURES -1 newest)
  execute_process(COMMAND ${nvcc} -std=c++20 -cubin -arch=sm_${newest} -ccbin ${CMAKE_CXX_COMPILER} -o ${probe}.cubin ${probe}.cu
                  RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
  if(failed)
    string(STRIP "${said}" said)
    message(STATUS "${nvcc} does not compile for sm_${newest}, so dmuon is built without CUDA kernels: ${said}")
    return()
  endif()
  message(STATUS "CUDA kernels by ${nvcc} ${ptxas}")
  set(DMUON_NVCC ${nvcc} PARENT_SCOPE)
  set(DMUON_OLDER_PTXAS "${ptxas}" PARENT_SCOPE)
endfunction()
dmuon_find_nvcc()

# Adds the kernels of sources to a target: dmuon_cuda_kernels(<target> SOURCES <file.cu>... OPTIONS <of nvcc>...).
# The target's code finds the fat binary of cuda/name.cu as `dmuon_cuda_name`.
function(dmuon_cuda_kernels target)
  cmake_parse_arguments(ARG "" "" "SOURCES;OPTIONS" ${ARGN})
  get_filename_component(bin ${DMUON_NVCC} REALPATH)
  get_filename_component(bin ${bin} DIRECTORY)
  find_program(fatbinary fatbinary HINTS ${bin} REQUIRED NO_CACHE)
  set(strict "")
  if(CMAKE_COMPILE_WARNING_AS_ERROR) # as for C++: an install never fails by what a newer nvcc warns of
    set(strict --Werror all-warnings -Xptxas -warn-spills,-Werror)
    set(strict_ptxas -warn-spills -Werror)
    set(strict_nvcc ${PROJECT_SOURCE_DIR}/cmake/strict_nvcc)
  endif()
  set(assembly "")
  set(fatbins "")
  foreach(source IN LISTS ARG_SOURCES)
    get_filename_component(name ${source} NAME_WE)
    set(images "")
    set(cubins "")
    foreach(number IN LISTS DMUON_CUDA_ARCHITECTURES)
      set(cubin ${CMAKE_CURRENT_BINARY_DIR}/${name}.sm_${number}.cubin)
      set(options -std=c++20 -O3 -ccbin ${CMAKE_CXX_COMPILER} ${strict} ${ARG_OPTIONS} -MD -MF ${cubin}.d -MT ${cubin}
                  -I${PROJECT_SOURCE_DIR}/src ${CMAKE_CURRENT_SOURCE_DIR}/${source})
      set(nvcc ${strict_nvcc} ${CMAKE_CXX_COMPILER_LAUNCHER} ${DMUON_NVCC})
      set(commands COMMAND ${nvcc} -cubin -arch=sm_${number} ${options} -o ${cubin})
      if(DMUON_OLDER_PTXAS AND number LESS 100)
        # PTX of CUDA 13 that says to be 12.9's.
        set(commands COMMAND ${nvcc} -ptx -arch=compute_${number} ${options} -o ${cubin}.ptx
                     COMMAND sed -i "s/^[.]version .*/.version 8.7/" ${cubin}.ptx
                     COMMAND ${strict_nvcc} ${DMUON_OLDER_PTXAS} -O3 -arch=sm_${number} ${strict_ptxas} -o ${cubin} ${cubin}.ptx)
      endif()
      add_custom_command(OUTPUT ${cubin} ${commands}
        DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${source} DEPFILE ${cubin}.d VERBATIM COMMENT "nvcc ${name} sm_${number}")
      list(APPEND cubins ${cubin})
      list(APPEND images --image3=kind=elf,sm=${number},file=${cubin})
    endforeach()
    # Not compressed: a wheel compresses it, and the tests' driver reads it.
    set(fatbin ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin)
    add_custom_command(OUTPUT ${fatbin} COMMAND ${fatbinary} -64 --compress=false ${images} --create=${fatbin}
      DEPENDS ${cubins} VERBATIM COMMENT "fatbinary ${name}")
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
