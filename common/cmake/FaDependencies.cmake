# What is installed comes first; what is missing is fetched at a pinned commit.
include(FetchContent)
find_package(Threads REQUIRED)

# The first Python that can draw, else the first one; charts need matplotlib, nothing else does.
foreach(candidate IN ITEMS $ENV{FA_PYTHON} python3 /usr/bin/python3)
  execute_process(COMMAND ${candidate} -c "import matplotlib" RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
  if(NOT Python3_EXECUTABLE AND failed EQUAL 0)
    find_program(Python3_EXECUTABLE ${candidate})
  endif()
endforeach()
find_package(Python3 COMPONENTS Interpreter)
if(NOT Python3_FOUND)
  message(FATAL_ERROR "Python 3 was not found; it applies marks and draws charts. "
                      "Debian and Ubuntu: apt-get install python3")
endif()

find_package(Eigen3 3.4 QUIET NO_MODULE)
if(NOT TARGET Eigen3::Eigen)
  message(STATUS "Eigen 3.4 is not installed; fetching it")
  # Only headers are needed: a SOURCE_SUBDIR that does not exist keeps Eigen's own targets out.
  FetchContent_Declare(eigen
    GIT_REPOSITORY https://gitlab.com/libeigen/eigen.git
    GIT_TAG 3147391d946bb4b6c68edd901f2add6ac1f31f8c # 3.4.0
    SOURCE_SUBDIR not_built)
  FetchContent_MakeAvailable(eigen)
  add_library(fa_eigen INTERFACE)
  target_include_directories(fa_eigen SYSTEM INTERFACE ${eigen_SOURCE_DIR})
  add_library(Eigen3::Eigen ALIAS fa_eigen)
endif()

if(BUILD_TESTING)
  FetchContent_Declare(googletest
    GIT_REPOSITORY https://github.com/google/googletest.git
    GIT_TAG f8d7d77c06936315286eb55f8de22cd23c188571 # 1.14.0
    SYSTEM
    FIND_PACKAGE_ARGS 1.11 NAMES GTest)
  set(INSTALL_GTEST OFF)
  FetchContent_MakeAvailable(googletest)
  if(TARGET gtest)
    target_compile_options(gtest PRIVATE ${FA_COMPILED_FAST})
  endif()
  include(GoogleTest)
endif()

if(FA_BENCHMARKS)
  set(BENCHMARK_ENABLE_TESTING OFF)
  set(BENCHMARK_ENABLE_INSTALL OFF)
  FetchContent_Declare(benchmark
    GIT_REPOSITORY https://github.com/google/benchmark.git
    GIT_TAG 344117638c8ff7e239044fd0fa7085839fc03021 # 1.8.3
    SYSTEM
    FIND_PACKAGE_ARGS 1.7)
  FetchContent_MakeAvailable(benchmark)
endif()
