# A compiler may link its C++ library as an archive: one that was moved without libstdc++.so, or that is told so. Each
# module would have a copy of it, beside PyTorch's; the copies share some of their objects, and a stream that prints a
# number crashes. So the shared library is named before the compiler's own, which then has nothing left to add.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  return()
endif()
set(folder ${CMAKE_BINARY_DIR}/libstdcxx)
file(WRITE ${folder}/hello.cpp "#include <iostream>\nint main() { std::cout << 1; }\n")
try_compile(links ${folder} SOURCES ${folder}/hello.cpp COPY_FILE ${folder}/hello)
if(links)
  file(STRINGS ${folder}/hello is_shared REGEX "libstdc\\+\\+\\.so" LIMIT_COUNT 1)
endif()
if(NOT links OR is_shared)
  return()
endif()
find_library(DMUON_LIBSTDCXX libstdc++.so.6 PATHS /usr/lib/${CMAKE_SYSTEM_PROCESSOR}-linux-gnu /usr/lib64 /usr/lib)
if(NOT DMUON_LIBSTDCXX)
  message(FATAL_ERROR "${CMAKE_CXX_COMPILER} links libstdc++ as an archive, and there is no libstdc++.so.6: dmuon must "
                      "share it with PyTorch. Set DMUON_LIBSTDCXX to the library")
endif()
message(STATUS "The compiler links libstdc++ as an archive; dmuon is linked with ${DMUON_LIBSTDCXX}")
link_libraries(${DMUON_LIBSTDCXX})
