# fa_add_stage(ID NAME
#   CUDA     the sources are CUDA: built for the GPU, and for the CPU's emulation
#   THREADS  has threads, as CUDA stages have: tested under ThreadSanitizer, too
#   LESSON   files of the lesson, the ones a reader rewrites
#   SOURCES  other files, entry.cpp
#   PROGRAMS files with a main() of their own; for a CUDA stage. A README.md beside them may quote what they print.
#   TABLES   files with a main() that print what the chapter quotes; run on the CPU, with the stage and the judge
#   PREVIOUS ids of stages that this one's tests and benchmark compare with)
#
# Expects check/test.cpp, check/bench.cpp and check/mutants.txt. Makes, for stage 01:
#   stage01         the library
#   stage01_tests   registered as stage01.*       `ctest -R stage01` runs exactly these
#   stage01_bench   the benchmark, and a smoke run of it
#   stage01_tested  builds what its tests need, but neither the benchmark nor a mutant
#   stage01_all     builds all of these
#   mutants         registered as stage01.mutant.*: each must be caught by the test that it names; and as
#                   stage01.unmutated.*, of a program of many mutants: where none is chosen, these tests pass
#   skeletons       registered as stage01.skeleton.*, of all levels: as it is, none may pass the tests
#   exercise01_tests, hunt01_tests   the same tests on the reader's own files, if there are any; built
#                   on demand and run by common/practice, not among the others
# and for a CUDA stage, 04, stage04_on_cpu[_tests] and stage04_on_gpu[_tests], registered as
# stage04.on_cpu.* and stage04.on_gpu.*; its mutants run on the CPU.

set(FA_MUTANTS_TOOL ${PROJECT_SOURCE_DIR}/common/judge/mutants.py)
set(FA_MARKS_TOOL ${PROJECT_SOURCE_DIR}/common/practice/marks.py)
add_custom_target(tested)  # all that tests need, but neither benchmarks nor mutants

function(fa_add_stage id name)
  cmake_parse_arguments(S "CUDA;THREADS" "" "LESSON;SOURCES;PREVIOUS;PROGRAMS;TABLES" ${ARGN})
  set(stage stage${id})
  set(dir ${CMAKE_CURRENT_SOURCE_DIR})
  set(previous ${S_PREVIOUS})
  if(FA_ONLY_THREADS AND NOT S_CUDA AND NOT S_THREADS)
    set_property(DIRECTORY PROPERTY EXCLUDE_FROM_ALL TRUE)  # built where a later stage's tests call it
  endif()
  fa_previous("")
  fa_stage_targets(${stage})
  if(NOT S_CUDA)
    set_property(GLOBAL APPEND PROPERTY FA_SUMMARY "${id}  ${name}: built")
    fa_stage_variant(${stage} ${stage} ${stage} "")
    fa_stage_benchmark(${stage} ${stage})
    fa_stage_mutants(${stage} ${stage} "")
    fa_stage_skeletons(${stage} ${stage} "")
    fa_stage_practice(${id} ${stage} "" "")
    return()
  endif()

  fa_previous(on_cpu)
  fa_stage_variant(${stage} ${stage}_on_cpu ${stage}.on_cpu on_cpu)
  fa_stage_tables(${stage})
  fa_stage_mutants(${stage} ${stage}_on_cpu on_cpu)
  fa_stage_skeletons(${stage} ${stage}_on_cpu on_cpu)
  fa_stage_practice(${id} ${stage}_on_cpu on_cpu "")
  if(FA_HAVE_CUDA)
    set_property(GLOBAL APPEND PROPERTY FA_SUMMARY "${id}  ${name}: built for the GPU, and for the CPU's emulation")
    fa_previous(on_gpu)
    fa_stage_variant(${stage} ${stage}_on_gpu ${stage}.on_gpu on_gpu)
    fa_stage_benchmark(${stage} ${stage}_on_gpu)
    if(FA_GPU_FOUND)
      fa_stage_practice(${id} ${stage}_on_gpu on_gpu _on_gpu)
    endif()
  else()
    set_property(GLOBAL APPEND PROPERTY FA_SUMMARY "${id}  ${name}: emulated on the CPU only (${FA_NO_CUDA_REASON})")
    fa_not_built(${stage}.on_gpu "${FA_NO_CUDA_REASON}" ${stage})
  endif()
endfunction()

function(fa_stage_targets stage)
  add_custom_target(${stage}_tested)
  add_custom_target(${stage}_all)
  add_dependencies(${stage}_all ${stage}_tested)
  add_dependencies(tested ${stage}_tested)
endfunction()

# Stands for tests PREFIX.* that are not built here: shown as skipped, with the reason.
function(fa_not_built prefix reason label)
  fa_skipped(${prefix}.not_built "${reason}" ${label})
endfunction()
function(fa_skipped test reason labels)
  if(BUILD_TESTING)
    add_test(NAME ${test}
      COMMAND ${CMAKE_COMMAND} -DREASON=${reason} -P ${PROJECT_SOURCE_DIR}/common/cmake/skip.cmake ${ARGN})
    set_tests_properties(${test} PROPERTIES LABELS "${labels}" SKIP_REGULAR_EXPRESSION "SKIPPED")
  endif()
endfunction()

# S_PREVIOUS: the libraries of the stages in `previous`, of the variant if they have one. Under ThreadSanitizer
# no test calls 00 or 01, which take the longest to compile.
macro(fa_previous variant)
  set(S_PREVIOUS)
  foreach(id_before IN LISTS previous)
    if(FA_ONLY_THREADS AND id_before MATCHES "^0[01]$")
      continue()
    elseif(TARGET stage${id_before}_${variant})
      list(APPEND S_PREVIOUS stage${id_before}_${variant})
    else()
      list(APPEND S_PREVIOUS stage${id_before})
    endif()
  endforeach()
endmacro()

# One object library per file. A .cu file is CUDA for the GPU; for the CPU's emulation a generated
# .cpp includes it, so that its lines keep their names.
function(fa_stage_object target variant)
  set(sources)
  foreach(file IN LISTS ARGN)
    cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    if(variant STREQUAL "on_cpu" AND file MATCHES "[.]cu$")
      string(MD5 hash ${file})
      cmake_path(GET file STEM stem)
      set(wrapper ${CMAKE_CURRENT_BINARY_DIR}/emulated/${stem}_${hash}.cpp)
      file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${file}\"\n")
      set_source_files_properties(${wrapper} PROPERTIES OBJECT_DEPENDS ${file})
      set(file ${wrapper})
    endif()
    list(APPEND sources ${file})
  endforeach()
  add_library(${target} OBJECT ${sources})
  target_link_libraries(${target} PUBLIC fa_core PRIVATE fa_warnings)
  if(variant STREQUAL "on_cpu")
    target_link_libraries(${target} PUBLIC fa_emulator)
  elseif(variant STREQUAL "on_gpu")
    target_link_libraries(${target} PUBLIC fa_cuda)
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)  # for stageNN_peer
  endif()
endfunction()

function(fa_stage_variant stage library prefix variant)
  set(objects)
  foreach(file IN LISTS S_LESSON S_SOURCES)
    get_filename_component(stem ${file} NAME_WE)
    fa_stage_object(${library}_${stem} "${variant}" ${file})
    target_compile_options(${library}_${stem} PRIVATE ${FA_CUDA_FAST})
    list(APPEND objects $<TARGET_OBJECTS:${library}_${stem}>)
  endforeach()
  add_library(${library} STATIC ${objects})
  target_link_libraries(${library} PUBLIC fa_core)
  if(variant STREQUAL "on_cpu")
    target_link_libraries(${library} PUBLIC fa_emulator)
  elseif(variant STREQUAL "on_gpu")
    target_link_libraries(${library} PUBLIC fa_cuda)
  endif()
  add_dependencies(${stage}_tested ${library})

  # Small programs of their own; each checks its result and returns 0, or 77 where it cannot run.
  if(S_PROGRAMS AND NOT TARGET ${stage}_programs)
    add_custom_target(${stage}_programs)
    add_dependencies(${stage}_tested ${stage}_programs)
  endif()
  foreach(file IN LISTS S_PROGRAMS)
    get_filename_component(folder ${file} DIRECTORY)
    get_filename_component(stem ${file} NAME_WE)
    set(program ${library}_${stem})
    fa_stage_object(${program}_object "${variant}" ${file})
    add_executable(${program} $<TARGET_OBJECTS:${program}_object>)
    set_target_properties(${program} PROPERTIES LINKER_LANGUAGE CXX OUTPUT_NAME ${stem}_${variant})
    target_link_libraries(${program} PRIVATE $<IF:$<STREQUAL:${variant},on_cpu>,fa_emulator,fa_cuda>)
    add_dependencies(${stage}_programs ${program})
    if(BUILD_TESTING)
      add_test(NAME ${prefix}.program.${stem} COMMAND ${Python3_EXECUTABLE}
        ${PROJECT_SOURCE_DIR}/common/tests/quoted.py $<TARGET_FILE:${program}> ${dir}/${folder}/README.md)
      set_tests_properties(${prefix}.program.${stem} PROPERTIES LABELS ${stage} TIMEOUT 60
        SKIP_RETURN_CODE 77)
    endif()
  endforeach()

  if(BUILD_TESTING AND (S_CUDA OR S_THREADS OR NOT FA_ONLY_THREADS))
    add_library(${library}_check OBJECT check/test.cpp)
    target_link_libraries(${library}_check PUBLIC ${library} fa_suite ${S_PREVIOUS} PRIVATE fa_warnings)
    target_compile_options(${library}_check PRIVATE ${FA_COMPILED_FAST})
    fa_stage_tests(${library}_tests ${library} "${variant}" "" "")
    add_dependencies(${stage}_tested ${library}_tests)
    if(variant STREQUAL "on_gpu")
      fa_discover_on_gpu(${library}_tests ${prefix} ${stage} 300)
    else()
      fa_discover(${library}_tests ${prefix} ${stage} 300)
    endif()
  endif()
endfunction()

function(fa_stage_tables stage)
  if(FA_SANITIZE OR NOT BUILD_TESTING)
    return()  # the same in every build
  endif()
  foreach(file IN LISTS S_TABLES)
    get_filename_component(stem ${file} NAME_WE)
    set(program ${stage}_on_cpu_${stem})
    add_executable(${program} ${file})
    set_target_properties(${program} PROPERTIES OUTPUT_NAME ${stem}_on_cpu)
    target_link_libraries(${program} PRIVATE ${stage}_on_cpu fa_judge fa_warnings)
    add_dependencies(${stage}_tested ${program})
    add_test(NAME ${stage}.on_cpu.table.${stem} COMMAND ${Python3_EXECUTABLE}
      ${PROJECT_SOURCE_DIR}/common/tests/quoted.py $<TARGET_FILE:${program}> ${dir}/README.md)
    set_tests_properties(${stage}.on_cpu.table.${stem} PROPERTIES LABELS ${stage} TIMEOUT 60)
  endforeach()
endfunction()

# The tests of a program as PREFIX.*
function(fa_discover target prefix label timeout)
  gtest_discover_tests(${target} TEST_PREFIX ${prefix}. DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 ${ARGN}
    PROPERTIES LABELS ${label} TIMEOUT ${timeout})
endfunction()

# Where no GPU answers, one test stands for all of them: each would load cuBLAS to say that it cannot run.
function(fa_discover_on_gpu target prefix label timeout)
  if(FA_GPU_FOUND)
    fa_discover(${target} ${prefix} ${label} ${timeout})
  else()
    add_test(NAME ${prefix}.needs_a_gpu COMMAND sh ${PROJECT_SOURCE_DIR}/common/cmake/needs_a_gpu.sh $<TARGET_FILE:${target}>)
    set_tests_properties(${prefix}.needs_a_gpu PROPERTIES LABELS ${label} TIMEOUT 1500 SKIP_RETURN_CODE 77)
  endif()
endfunction()

function(fa_stage_benchmark stage library)
  if(NOT FA_BENCHMARKS)
    return()
  endif()
  add_executable(${stage}_bench check/bench.cpp)
  target_link_libraries(${stage}_bench PRIVATE ${library} ${S_PREVIOUS} fa_bench fa_warnings)
  if(S_CUDA)
    target_link_libraries(${stage}_bench PRIVATE fa_gpu_bench)
    set_target_properties(${stage}_bench PROPERTIES LINKER_LANGUAGE CXX)
    # The kernels as C functions, for check/peers.py; of 06 also those of its walks.
    file(GLOB peers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/beyond/*/check/peer*.c*)
    add_library(${stage}_peer SHARED check/peer.cpp ${peers})
    set_target_properties(${stage}_peer PROPERTIES LINKER_LANGUAGE CXX)
    target_compile_definitions(${stage}_peer PRIVATE
      FA_COMPILER="nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
      FA_FLAGS="${CMAKE_CUDA_FLAGS_RELEASE}")
    target_link_libraries(${stage}_peer PRIVATE ${library} ${S_PREVIOUS} fa_warnings)
    add_dependencies(${stage}_all ${stage}_peer)
  endif()
  add_dependencies(${stage}_all ${stage}_bench)
  if(BUILD_TESTING)
    add_test(NAME ${stage}.bench_smoke COMMAND ${stage}_bench --smoke)
    set_tests_properties(${stage}.bench_smoke PROPERTIES LABELS "${stage};bench" TIMEOUT 60
      SKIP_RETURN_CODE 77)
  endif()
endfunction()

# Under ThreadSanitizer only mutants without a barrier are built: the sanitizer must name the line.
function(fa_stage_mutants stage library variant)
  set(race "")
  if(FA_SANITIZE MATCHES "thread" AND variant STREQUAL "on_cpu")
    set(race race)
  elseif(NOT FA_MUTANTS)
    return()
  endif()
  if(NOT BUILD_TESTING)
    return()
  endif()
  set(programs)
  fa_list_mutants(lines ${race})
  foreach(line IN LISTS lines)
    fa_mutant("${line}")
    if(NOT file IN_LIST S_LESSON AND NOT file IN_LIST S_SOURCES)
      continue()  # of 06, which has several programs
    endif()
    if(alone)
      fa_mutated(mutants/${mutant}/${file} apply ${mutant})
      set(program ${stage}_mutant_${mutant})
      set(source ${mutated})
    else()  # with all others of its file
      fa_mutated(mutants/${file} weave ${file} ${race})
      get_filename_component(stem ${file} NAME_WE)
      set(program ${stage}_mutants_${stem})
      set(source ${CMAKE_CURRENT_SOURCE_DIR}/${file})
      list(APPEND programs ${stem})
      list(APPEND killers_${stem} ${killer})
    endif()
    if(NOT TARGET ${program})
      fa_stage_tests(${program} ${library} "${variant}" ${file} ${mutated})
      add_dependencies(${stage}_all ${program})
    endif()
    if(race)
      fa_test_mutant(${stage}.race.${mutant} race ${program} ${killer} ${source})
    else()
      fa_test_mutant(${stage}.mutant.${mutant} verdict ${program} ${killer})
    endif()
  endforeach()

  list(REMOVE_DUPLICATES programs)
  foreach(stem IN LISTS programs)
    list(REMOVE_DUPLICATES killers_${stem})
    list(JOIN killers_${stem} ":" killers)
    add_test(NAME ${stage}.unmutated.${stem} COMMAND ${stage}_mutants_${stem} --gtest_brief=1 --gtest_filter=${killers})
    set_tests_properties(${stage}.unmutated.${stem} PROPERTIES LABELS "${stage};mutant" ENVIRONMENT FA_MUTANT=)
  endforeach()
endfunction()

# A line for each mutant of the stage.
function(fa_list_mutants result)
  set(list ${CMAKE_CURRENT_SOURCE_DIR}/check/mutants.txt)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
  execute_process(COMMAND ${Python3_EXECUTABLE} ${FA_MUTANTS_TOOL} list ${ARGN} ${list}
    OUTPUT_VARIABLE lines OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" lines "${lines}")
  set(${result} "${lines}" PARENT_SCOPE)
endfunction()

# In the caller: ${mutant}, the ${file} it changes, the test ${killer}, whether it is built ${alone}, and its ${order}.
macro(fa_mutant line)
  string(REPLACE "\t" ";" fields "${line}")
  list(GET fields 0 mutant)
  list(GET fields 1 file)
  list(GET fields 2 killer)
  list(GET fields 3 how)
  string(COMPARE EQUAL ${how} alone alone)
  list(GET fields 4 order)
endmacro()

# In the caller: ${mutated}, which mutants.py makes of the ${file} when it is built.
macro(fa_mutated output command what)
  set(mutated ${CMAKE_CURRENT_BINARY_DIR}/${output})
  add_custom_command(OUTPUT ${mutated}
    COMMAND ${Python3_EXECUTABLE} ${FA_MUTANTS_TOOL} ${command} ${ARGN}
            ${CMAKE_CURRENT_SOURCE_DIR}/check/mutants.txt ${what} ${CMAKE_CURRENT_SOURCE_DIR} -o ${mutated}
    DEPENDS check/mutants.txt ${file} ${FA_MUTANTS_TOOL} VERBATIM)
endmacro()

# The ${mutant}, judged by a command of mutants.py.
function(fa_test_mutant test command program)
  add_test(NAME ${test} COMMAND ${Python3_EXECUTABLE} ${FA_MUTANTS_TOOL} ${command} $<TARGET_FILE:${program}> ${ARGN})
  set_tests_properties(${test} PROPERTIES LABELS "${stage};mutant" SKIP_RETURN_CODE 77 ENVIRONMENT FA_MUTANT=${mutant})
endfunction()

# Which of `files` the folder holds; CMake looks again whenever it is asked to build.
function(fa_held result folder)
  file(GLOB_RECURSE held RELATIVE ${folder} CONFIGURE_DEPENDS ${folder}/*)
  set(found)
  foreach(file IN LISTS ARGN)
    if(file IN_LIST held)
      list(APPEND found ${file})
    endif()
  endforeach()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# No skeleton may pass as it is, of no level.
function(fa_stage_skeletons stage library variant)
  if(NOT FA_MUTANTS OR NOT BUILD_TESTING)
    return()
  endif()
  fa_held(files ${dir}/exercise ${S_LESSON})
  foreach(file IN LISTS files)
    foreach(level IN ITEMS 1 2 3)
      fa_skeleton(${file} ${level})
      fa_stage_tests(${target} ${library} "${variant}" ${file} ${skeleton})
      fa_judge_skeleton(${stage} ${target} ${test})
    endforeach()
  endforeach()
endfunction()

# In the caller: the ${skeleton} of a file at a level, made when built, and the ${test} and the ${target} that judge it.
macro(fa_skeleton file level)
  string(REGEX REPLACE "[.][a-z]+$" "" name ${file})
  string(MAKE_C_IDENTIFIER ${name} name)
  set(target ${stage}_skeleton_${name})
  set(test ${stage}.skeleton.${name})
  if(${level} GREATER 1)
    string(APPEND target _level${level})
    string(APPEND test .level${level})
  endif()
  set(skeleton ${CMAKE_CURRENT_BINARY_DIR}/skeletons/level${level}/${file})
  add_custom_command(OUTPUT ${skeleton}
    COMMAND ${Python3_EXECUTABLE} ${FA_MARKS_TOOL} skeleton ${CMAKE_CURRENT_SOURCE_DIR}/${file} --level ${level} --for-one-type
            -o ${skeleton}
    DEPENDS ${file} ${FA_MARKS_TOOL} VERBATIM)
endmacro()

function(fa_judge_skeleton stage target test)
  add_dependencies(${stage}_all ${target})
  add_test(NAME ${test} COMMAND ${Python3_EXECUTABLE} ${FA_MUTANTS_TOOL} skeleton $<TARGET_FILE:${target}> ${ARGN})
  set_tests_properties(${test} PROPERTIES LABELS "${stage};mutant" SKIP_RETURN_CODE 77)
endfunction()

# The tests on the reader's own files, and on the one with a planted mistake. Of the reader's, each
# is woven with its lesson, so that practice.py can judge every hole alone; exerciseNN_plain_tests
# is for code that cannot be woven.
function(fa_stage_practice id library variant suffix)
  if(NOT TARGET ${library}_check)
    return()
  endif()
  foreach(kind mine hunt)
    fa_held(files ${dir}/${kind} ${S_LESSON} ${S_SOURCES})
    if(NOT files)
      continue()
    endif()
    list(TRANSFORM files PREPEND ${dir}/${kind}/ OUTPUT_VARIABLE paths)
    if(kind STREQUAL "hunt" OR suffix)
      string(REPLACE mine exercise name ${kind})
      fa_stage_tests(${name}${id}${suffix}_tests ${library} "${variant}" "${files}" "${paths}")
    else()
      fa_stage_tests(exercise${id}_plain_tests ${library} "${variant}" "${files}" "${paths}")
      fa_woven(woven "${files}")
      set(FA_UNDER_TEST_INSTEAD "${paths}")
      fa_stage_tests(exercise${id}_tests ${library} "${variant}" "${files}" "${woven}")
    endif()
  endforeach()
endfunction()

# The files of mine/, each woven with its lesson. What has Eigen's products for two types, or kernels for
# both half types, becomes two files, since they are most of what a reader waits for.
function(fa_woven result files)
  set(woven)
  foreach(file IN LISTS files)
    file(STRINGS ${dir}/${file} doubles REGEX "MatrixMap<const double>")
    file(STRINGS ${dir}/${file} halves REGEX "^template .*<__half>")
    set(parts whole)
    if(doubles)
      set(parts float double)
    elseif(halves)
      set(parts __half __nv_bfloat16)
    endif()
    foreach(part IN LISTS parts)
      set(out ${CMAKE_CURRENT_BINARY_DIR}/woven/${part}/${file})
      set(type)
      if(doubles OR halves)
        set(type --type ${part})
      endif()
      set(tools ${PROJECT_SOURCE_DIR}/common/practice)
      add_custom_command(OUTPUT ${out}
        COMMAND ${Python3_EXECUTABLE} ${tools}/weave.py ${dir} mine/${file} -o ${out} ${type}
        DEPENDS mine/${file} ${file} check/practice.txt ${tools}/weave.py ${tools}/marks.py VERBATIM)
      list(APPEND woven ${out})
    endforeach()
  endforeach()
  set(${result} "${woven}" PARENT_SCOPE)
endfunction()

# The stage's tests, linked with `replacements` in place of the files `replaced`.
function(fa_stage_tests target library variant replaced replacements)
  set(objects $<TARGET_OBJECTS:${library}_check>)
  foreach(file IN LISTS S_LESSON S_SOURCES)
    if(NOT file IN_LIST replaced)
      get_filename_component(stem ${file} NAME_WE)
      list(APPEND objects $<TARGET_OBJECTS:${library}_${stem}>)
    endif()
  endforeach()
  set(named ${replacements})
  if(FA_UNDER_TEST_INSTEAD)
    set(named ${FA_UNDER_TEST_INSTEAD})
  endif()
  fa_under_test(banner ${target} "${named}")
  if(replacements)
    fa_stage_object(${target}_object "${variant}" ${replacements})
    target_compile_options(${target}_object PRIVATE ${FA_COMPILED_FAST})
    # The program asks for it, `all` does not.
    set_target_properties(${target}_object PROPERTIES EXCLUDE_FROM_ALL TRUE)
    if(target MATCHES "^exercise")
      set_target_properties(${target}_object PROPERTIES FA_READERS TRUE)
      target_link_libraries(${target}_object PRIVATE fa_readers)
      if(replacements MATCHES "/woven/double/")
        target_precompile_headers(${target}_object PRIVATE ${PROJECT_SOURCE_DIR}/common/practice/eigen.hpp)
        list(APPEND objects $<TARGET_OBJECTS:fa_practice_eigen>)
      else()
        target_compile_options(${target}_object PRIVATE
          $<$<COMPILE_LANGUAGE:CXX>:-include ${PROJECT_SOURCE_DIR}/common/practice/assertions.hpp>)
      endif()
    else()  # deliberate defects may leave a variable unused, which would end a hunt before it begins
      target_compile_options(${target}_object PRIVATE -w)
    endif()
    list(PREPEND objects $<TARGET_OBJECTS:${target}_object>)
    # A mutant or a skeleton may lack the instantiations for double (see source.py): those of the lesson follow.
    # Of two for float, as of any inline function, the linker takes the first.
    if(target MATCHES "_(mutants?|skeleton)_")
      foreach(file IN LISTS replaced)
        file(STRINGS ${CMAKE_CURRENT_SOURCE_DIR}/${file} doubles REGEX "MatrixMap<const double>")
        if(doubles)
          get_filename_component(stem ${file} NAME_WE)
          list(APPEND objects $<TARGET_OBJECTS:${library}_${stem}>)
        endif()
      endforeach()
    endif()
  endif()
  add_executable(${target} ${banner} ${objects})
  target_link_libraries(${target} PRIVATE fa_suite ${S_PREVIOUS})
  if(target MATCHES "^(exercise|hunt)")
    target_link_libraries(${target} PRIVATE fa_practice)
    set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL TRUE)
  endif()
  if(variant STREQUAL "on_cpu")
    target_link_libraries(${target} PRIVATE fa_emulator)
  elseif(variant STREQUAL "on_gpu")
    target_link_libraries(${target} PRIVATE fa_cuda)
    set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
  endif()
endfunction()

# The source file that lets a test program say which files it tests in place of the lesson's.
function(fa_under_test result target replacements)
  set(under_test)
  foreach(file IN LISTS replacements)
    file(RELATIVE_PATH file ${PROJECT_SOURCE_DIR} ${file})
    list(APPEND under_test ${file})
  endforeach()
  list(JOIN under_test ", " FA_UNDER_TEST)
  set(banner ${CMAKE_CURRENT_BINARY_DIR}/${target}_under_test.cpp)
  file(CONFIGURE OUTPUT ${banner} @ONLY
    CONTENT "extern const char* const fa_under_test;\nconst char* const fa_under_test = \"@FA_UNDER_TEST@\";\n")
  set(${result} ${banner} PARENT_SCOPE)
endfunction()

function(fa_print_summary)
  get_property(lines GLOBAL PROPERTY FA_SUMMARY)
  message(STATUS "")
  foreach(line IN LISTS lines)
    message(STATUS "  stage ${line}")
  endforeach()
  if(FA_HAVE_CUDA)
    message(STATUS "  CUDA: ${CMAKE_CUDA_COMPILER}")
  else()
    message(STATUS "  CUDA: none (${FA_NO_CUDA_REASON})")
  endif()
  message(STATUS "")
endfunction()
