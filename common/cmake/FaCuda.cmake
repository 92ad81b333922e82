# Sets FA_HAVE_CUDA and, when it is false, FA_NO_CUDA_REASON in words; FA_GPU_FOUND if a GPU answers.
set(FA_HAVE_CUDA FALSE)
set(FA_GPU_FOUND FALSE)
set(FA_NO_CUDA_REASON "")
if(FA_CUDA STREQUAL "OFF")
  set(FA_NO_CUDA_REASON "FA_CUDA=OFF")
  return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(FA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FA_CUDA=ON, but no CUDA compiler was found. Put nvcc on PATH, or set "
                        "CMAKE_CUDA_COMPILER, or use FA_CUDA=AUTO to leave the GPU stages out")
  endif()
  set(FA_NO_CUDA_REASON "nvcc was not found")
  return()
endif()

# Architectures: what the user says; else what the GPU answers; else 8.0, whose PTX later GPUs
# translate when a program starts. Not `native`, which fails where no GPU is.
find_program(FA_NVIDIA_SMI nvidia-smi)
mark_as_advanced(FA_NVIDIA_SMI)
set(capability "")
if(FA_NVIDIA_SMI)
  execute_process(COMMAND ${FA_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE capability OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(capability MATCHES "^([0-9]+)[.]([0-9]+)")
  set(FA_GPU_FOUND TRUE)
  set(capability ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
else()
  set(capability 80)
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES ${capability} CACHE STRING "Compute capabilities, like 80 or 75;90")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
  if(FA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "the CUDA Toolkit must be 12.4 or later, found ${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
  set(FA_NO_CUDA_REASON "the CUDA Toolkit is ${CMAKE_CUDA_COMPILER_VERSION}, 12.4 or later is needed")
  return()
endif()
find_package(CUDAToolkit REQUIRED)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake 3.25 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(FA_HAVE_CUDA TRUE)

# FA_CUDA_QUICK, where no GPU will run what is built: of kernels' files nvcc makes the device code alone, with ptxas's
# word on it, and the programs are linked without them. What a kernel's file does on the host the emulator runs.
# Of nvcc the level is for host code alone; kernels have a flag of their own.
set(FA_CUDA_FAST "")
if(FA_CUDA_QUICK)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O0 -DNDEBUG")
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES APPEND -real REGEX "^[0-9]+$")
  add_compile_definitions(FA_ONE_FOR_FP16)  # scores' kernels: one in fp16 for all changes, in bf16 one for each
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    set(FA_CUDA_FAST $<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
  endif()
endif()

# An object library of kernels; `spills`: whether registers in memory are an error, a warning or allowed (ptxas.py).
function(fa_kernels target spills)
  set(how --spills=${spills})
  if(FA_CUDA_QUICK)
    list(APPEND how --device-code-alone)
  endif()
  set_target_properties(${target} PROPERTIES
    CUDA_COMPILER_LAUNCHER "${Python3_EXECUTABLE};${PROJECT_SOURCE_DIR}/common/cmake/ptxas.py;compile;${how};--")
endfunction()

add_library(fa_cuda INTERFACE)
target_link_libraries(fa_cuda INTERFACE fa_tuned CUDA::cudart CUDA::cublas)
# -lineinfo: profilers and sanitizers name source lines. 554: a conversion of a view of constants to
# itself, which is never called.
target_compile_options(fa_cuda INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:-lineinfo;-diag-suppress=554>")
if(FA_CUDA_QUICK)
  target_link_options(fa_cuda INTERFACE LINKER:--unresolved-symbols=ignore-all)
endif()
