# Flags are global, so that every file of a program agrees on vector widths and alignment.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")

# Of tests and of files that a reader waits for: half the time of compilation, and what takes time
# while tests run is the oracle and the lessons.
set(FA_COMPILED_FAST $<$<COMPILE_LANGUAGE:CXX>:-O1>)

# Of kernels for the emulator: two thirds of the time of -O1.
set(FA_EMULATED_FAST $<IF:$<CXX_COMPILER_ID:GNU>,-Og,-O1>)

# No -ffast-math, ever: it deletes the handling of NaN and infinity that half the course is about.
set(FA_FLAGS -fno-math-errno)
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-ftrivial-auto-var-init=pattern FA_HAVE_VAR_INIT)
if(FA_ARCH STREQUAL "native")
  check_cxx_compiler_flag(-march=native FA_HAVE_MARCH_NATIVE)
  check_cxx_compiler_flag(-mcpu=native FA_HAVE_MCPU_NATIVE)
  if(FA_HAVE_MARCH_NATIVE)
    list(APPEND FA_FLAGS -march=native)
  elseif(FA_HAVE_MCPU_NATIVE)
    list(APPEND FA_FLAGS -mcpu=native)
  endif()
elseif(NOT FA_ARCH STREQUAL "portable")
  list(APPEND FA_FLAGS -march=${FA_ARCH})
endif()
# Clang takes as long again to make tests fast that run for a moment; the oracle stays fast (common/CMakeLists.txt).
if(FA_SANITIZE AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  set(FA_COMPILED_FAST $<$<COMPILE_LANGUAGE:CXX>:-O0>)
endif()
# ThreadSanitizer has nothing to say of what has one thread, and takes ten times as long for it.
set(FA_ONLY_THREADS FALSE)
if(FA_SANITIZE MATCHES "thread")
  set(FA_ONLY_THREADS TRUE)
endif()
if(FA_SANITIZE)
  list(APPEND FA_FLAGS -fsanitize=${FA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -DFA_SANITIZED
    -DFA_ONE_FOR_ALL)
  if(FA_SANITIZE MATCHES "undefined")
    list(APPEND FA_FLAGS -fsanitize=float-cast-overflow)
    if(FA_SANITIZE MATCHES "address")  # which sees that itself; half of what Clang needs for the judge
      list(APPEND FA_FLAGS -fno-sanitize=null,object-size,vptr)
    endif()
  endif()
  add_link_options(-fsanitize=${FA_SANITIZE})
  # The emulator has an operator new of its own (emulator/cuda_on_cpu.cpp), and so has what Clang links for C++.
  if(FA_ONLY_THREADS AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    string(REGEX MATCH "-stdlib=libc[+][+]" is_libcxx "${CMAKE_CXX_FLAGS}")
    add_link_options(--driver-mode=gcc)
    link_libraries($<IF:$<BOOL:${is_libcxx}>,c++,stdc++> m)
  endif()
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${FA_FLAGS}>")

# Warnings for our own targets only; never errors in a reader's file.
add_library(fa_warnings INTERFACE)
target_compile_options(fa_warnings INTERFACE
  # GCC 12 takes the undefined registers of its own AVX-512 header for a mistake of ours.
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized;-Wno-maybe-uninitialized> $<$<AND:$<BOOL:${FA_WERROR}>,$<NOT:$<BOOL:$<TARGET_PROPERTY:FA_READERS>>>>:-Werror>>)

# Of tests. Half of what a file of them takes is to read these headers, which are read once.
function(fa_tests target)
  target_compile_options(${target} PRIVATE ${FA_COMPILED_FAST})
  target_precompile_headers(${target} REUSE_FROM fa_test_headers)
endfunction()
