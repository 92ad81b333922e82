# fa_add_ladder(ID NAME
#   AMPERE    .cu files, a kernel each, for compute capability 8.0 and later
#   HOPPER    .cu files, a kernel each, for 9.0 alone (sm_90a: wgmma, TMA)
#   SOURCES   other files, entry.cu
#   PTX_TESTS tests of single instructions, for 9.0 alone (default: check/test_ptx.cu, if it exists)
#   PREVIOUS  ids of stages that this one's tests and benchmark compare with)
#
# For kernels of tensor cores, which nothing emulates. Makes, for stage 06, of what check/ holds:
#   stage06_on_gpu         the library
#   stage06_on_gpu_tests   check/test.cpp, registered as stage06.on_gpu.*
#   stage06_ptx_tests      registered as stage06.ptx.*
#   stage06_layouts_tests  check/test_layouts.cpp: host code, built everywhere; stage06.layouts.*
#   stage06_bench, stage06_peer
#   stage06_kernels        writes results/kernels.json: what ptxas said about every kernel
#   stage06_all            builds all of these but the last
# ptxas.py watches each kernel being compiled: see there what ends a build.
function(fa_add_ladder id name)
  cmake_parse_arguments(S "" "" "AMPERE;HOPPER;SOURCES;PTX_TESTS;PREVIOUS" ${ARGN})
  set(S_CUDA TRUE)
  set(stage stage${id})
  set(library ${stage}_on_gpu)
  set(previous ${S_PREVIOUS})
  add_custom_target(${stage}_all)
  fa_ladder_tests(${stage}_layouts_tests ${stage}.layouts check/test_layouts.cpp "")

  set(reason "")
  if(NOT FA_HAVE_CUDA)
    set(reason "${FA_NO_CUDA_REASON}")
  elseif(NOT S_SOURCES)
    set(reason "it has no kernels yet")
  endif()
  if(reason)
    set_property(GLOBAL APPEND PROPERTY FA_SUMMARY "${id}  ${name}: no kernels built (${reason})")
    fa_not_built(${stage}.on_gpu "${reason}" ${stage})
    return()
  endif()

  fa_previous(on_gpu)
  fa_ladder_architectures(ampere)
  list(JOIN ampere ", " text)
  set_property(GLOBAL APPEND PROPERTY FA_SUMMARY "${id}  ${name}: built for the GPU (${text}, 90a)")
  fa_stage_object(${library}_entry on_gpu ${S_SOURCES})
  set_target_properties(${library}_entry PROPERTIES CUDA_ARCHITECTURES "${ampere}")
  set(objects $<TARGET_OBJECTS:${library}_entry>)
  set(kernels)
  foreach(file IN LISTS S_AMPERE)
    fa_ladder_kernel(${file} "${ampere}" warning)
  endforeach()
  foreach(file IN LISTS S_HOPPER)
    fa_ladder_kernel(${file} 90a-real error)
  endforeach()
  add_library(${library} STATIC ${objects} ${kernels})
  target_link_libraries(${library} PUBLIC fa_core fa_cuda)
  add_dependencies(${stage}_all ${library})
  add_custom_target(${stage}_kernels VERBATIM COMMAND_EXPAND_LISTS
    COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/common/cmake/ptxas.py collect
            ${CMAKE_CURRENT_SOURCE_DIR}/results/kernels.json ${kernels})
  add_dependencies(${stage}_kernels ${library})

  if(NOT S_PTX_TESTS)
    set(S_PTX_TESTS check/test_ptx.cu)
  endif()
  fa_ladder_tests(${library}_tests ${stage}.on_gpu check/test.cpp "${library};${S_PREVIOUS}")
  fa_ladder_tests(${stage}_ptx_tests ${stage}.ptx "${S_PTX_TESTS}" fa_cuda)
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/check/bench.cpp)
    fa_stage_benchmark(${stage} ${library})
  endif()
endfunction()

# In the caller: ${objects}, ${kernels}. One target for each file, named after its path, since
# forward/ and backward/ may hold files of the same name.
macro(fa_ladder_kernel file architectures spills)
  string(REGEX REPLACE "[.]cu$" "" target ${file})
  string(MAKE_C_IDENTIFIER ${stage}_${target} target)
  fa_stage_object(${target} on_gpu ${file})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-O3>)  # in any build type
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${architectures}"
    CUDA_COMPILER_LAUNCHER
    "${Python3_EXECUTABLE};${PROJECT_SOURCE_DIR}/common/cmake/ptxas.py;compile;--spills=${spills};--")
  set_source_files_properties(${file} PROPERTIES
    OBJECT_DEPENDS ${PROJECT_SOURCE_DIR}/common/cmake/ptxas.py)
  list(APPEND kernels $<TARGET_OBJECTS:${target}>)
endmacro()

# The chosen architectures without those before 8.0, which have no bf16 in their tensor cores.
function(fa_ladder_architectures result)
  set(chosen ${CMAKE_CUDA_ARCHITECTURES})
  if(chosen STREQUAL "all")
    set(chosen ${CMAKE_CUDA_ARCHITECTURES_ALL})
  elseif(chosen STREQUAL "all-major")
    set(chosen ${CMAKE_CUDA_ARCHITECTURES_ALL_MAJOR})
  endif()
  set(kept)
  foreach(one IN LISTS chosen)
    if(one MATCHES "^([0-9]+)" AND CMAKE_MATCH_1 LESS 80)
      continue()
    endif()
    list(APPEND kept ${one})
  endforeach()
  if(NOT kept)
    set(kept 80)
  endif()
  set(${result} ${kept} PARENT_SCOPE)
endfunction()

# A test program of those of `files` that exist; nothing if none does.
function(fa_ladder_tests target prefix files libraries)
  list(TRANSFORM files PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  foreach(file IN LISTS files)
    if(NOT EXISTS ${file})
      list(REMOVE_ITEM files ${file})
    endif()
  endforeach()
  if(NOT BUILD_TESTING OR NOT files)
    return()
  endif()
  set(banner ${CMAKE_CURRENT_BINARY_DIR}/${target}_under_test.cpp)
  file(CONFIGURE OUTPUT ${banner}
    CONTENT "extern const char* const fa_under_test;\nconst char* const fa_under_test = \"\";\n")
  add_executable(${target} ${banner} ${files})
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX CUDA_ARCHITECTURES 90a-real)
  target_link_libraries(${target} PRIVATE fa_harness ${libraries} fa_warnings)
  add_dependencies(${stage}_all ${target})
  gtest_discover_tests(${target} TEST_PREFIX ${prefix}. DISCOVERY_MODE PRE_TEST
    PROPERTIES LABELS ${stage} TIMEOUT 120)
endfunction()
