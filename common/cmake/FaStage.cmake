# fa_add_stage(ID NAME
#   LESSON  files of the lesson, the ones a reader rewrites
#   SOURCES other files, entry.cpp
#   PREVIOUS ids of stages that this one's tests and benchmark compare with)
#
# Expects check/test.cpp, check/bench.cpp and check/mutants.txt. Makes, for stage 01:
#   stage01         the library
#   stage01_tests   registered as stage01.*       `ctest -R stage01` runs exactly these
#   stage01_bench   the benchmark, and a smoke run of it
#   stage01_all     builds all of these
#   mutants         registered as stage01.mutant.*: each must be caught by the test that it names
#   exercise01_tests, hunt01_tests   the same tests on the reader's own files (FA_LEARN)
set(FA_PRACTICE ${PROJECT_SOURCE_DIR}/common/harness/practice)

function(fa_add_stage id name)
  cmake_parse_arguments(S "" "" "LESSON;SOURCES;PREVIOUS" ${ARGN})
  set(stage stage${id})
  set(dir ${CMAKE_CURRENT_SOURCE_DIR})
  get_filename_component(folder ${dir} NAME)
  set_property(GLOBAL APPEND PROPERTY FA_SUMMARY "${id}  ${name}: built")
  list(TRANSFORM S_PREVIOUS PREPEND stage)

  # Every lesson file is an object of its own, so that tests can be linked with one exchanged.
  add_library(${stage}_entry OBJECT ${S_SOURCES})
  target_link_libraries(${stage}_entry PUBLIC fa_core PRIVATE fa_warnings)
  set(objects)
  foreach(file IN LISTS S_LESSON)
    get_filename_component(stem ${file} NAME_WE)
    add_library(${stage}_${stem} OBJECT ${file})
    target_link_libraries(${stage}_${stem} PUBLIC fa_core PRIVATE fa_warnings)
    list(APPEND objects $<TARGET_OBJECTS:${stage}_${stem}>)
  endforeach()
  add_library(${stage} STATIC $<TARGET_OBJECTS:${stage}_entry> ${objects})
  target_link_libraries(${stage} PUBLIC fa_core)
  add_custom_target(${stage}_all DEPENDS ${stage})

  if(BUILD_TESTING)
    add_library(${stage}_check OBJECT check/test.cpp)
    target_link_libraries(${stage}_check PUBLIC fa_harness ${S_PREVIOUS} PRIVATE fa_warnings)
    fa_stage_tests(${stage}_tests ${stage} "" "")
    add_dependencies(${stage}_all ${stage}_tests)
    gtest_discover_tests(${stage}_tests TEST_PREFIX ${stage}. DISCOVERY_MODE PRE_TEST
      PROPERTIES LABELS ${stage} TIMEOUT 120)
  endif()

  if(FA_BENCHMARKS)
    add_executable(${stage}_bench check/bench.cpp)
    target_link_libraries(${stage}_bench PRIVATE ${stage} ${S_PREVIOUS} fa_bench fa_warnings)
    add_dependencies(${stage}_all ${stage}_bench)
    if(BUILD_TESTING)
      add_test(NAME ${stage}.bench_smoke COMMAND ${stage}_bench --smoke)
      set_tests_properties(${stage}.bench_smoke PROPERTIES LABELS ${stage} TIMEOUT 60)
    endif()
  endif()

  if(BUILD_TESTING AND FA_MUTANTS)
    set(list ${dir}/check/mutants.txt)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
    execute_process(COMMAND ${Python3_EXECUTABLE} ${FA_PRACTICE}/mutants.py list ${list}
      OUTPUT_VARIABLE lines OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    string(REPLACE "\n" ";" lines "${lines}")
    foreach(line IN LISTS lines)
      string(REPLACE "\t" ";" fields "${line}")
      list(GET fields 0 mutant)
      list(GET fields 1 file)
      list(GET fields 2 killer)
      set(mutated ${CMAKE_CURRENT_BINARY_DIR}/mutants/${mutant}/${file})
      add_custom_command(OUTPUT ${mutated}
        COMMAND ${Python3_EXECUTABLE} ${FA_PRACTICE}/mutants.py
                apply ${list} ${mutant} ${dir} -o ${mutated}
        DEPENDS ${list} ${dir}/${file} ${FA_PRACTICE}/mutants.py VERBATIM)
      fa_stage_tests(${stage}_mutant_${mutant} ${stage} ${file} ${mutated})
      add_dependencies(${stage}_all ${stage}_mutant_${mutant})
      add_test(NAME ${stage}.mutant.${mutant}
        COMMAND ${Python3_EXECUTABLE} ${FA_PRACTICE}/mutants.py
                verdict $<TARGET_FILE:${stage}_mutant_${mutant}> ${killer})
      set_tests_properties(${stage}.mutant.${mutant} PROPERTIES LABELS "${stage};mutant"
        SKIP_RETURN_CODE 77)
    endforeach()
  endif()

  if(FA_LEARN)
    foreach(kind mine hunt)
      set(exercise exercise${id})
      if(kind STREQUAL "hunt")
        set(exercise hunt${id})
      endif()
      set(mine)
      foreach(file IN LISTS S_LESSON)
        if(EXISTS ${dir}/${kind}/${file})
          list(APPEND mine ${file})
        endif()
      endforeach()
      if(mine)
        list(TRANSFORM mine PREPEND ${dir}/${kind}/ OUTPUT_VARIABLE paths)
        fa_stage_tests(${exercise}_tests ${stage} "${mine}" "${paths}")
        gtest_discover_tests(${exercise}_tests TEST_PREFIX ${exercise}. DISCOVERY_MODE PRE_TEST
          PROPERTIES LABELS ${exercise} TIMEOUT 30)
      endif()
    endforeach()
  endif()
endfunction()

# The stage's tests, linked with `replacements` in place of the lesson files `replaced`.
function(fa_stage_tests target stage replaced replacements)
  set(objects $<TARGET_OBJECTS:${stage}_check> $<TARGET_OBJECTS:${stage}_entry>)
  set(under_test)
  foreach(file IN LISTS S_LESSON)
    if(NOT file IN_LIST replaced)
      get_filename_component(stem ${file} NAME_WE)
      list(APPEND objects $<TARGET_OBJECTS:${stage}_${stem}>)
    endif()
  endforeach()
  foreach(file IN LISTS replacements)
    file(RELATIVE_PATH file ${PROJECT_SOURCE_DIR} ${file})
    list(APPEND under_test ${file})
  endforeach()
  list(JOIN under_test ", " FA_UNDER_TEST)
  set(banner ${CMAKE_CURRENT_BINARY_DIR}/${target}_under_test.cpp)
  file(CONFIGURE OUTPUT ${banner} @ONLY
    CONTENT "extern const char* const fa_under_test;\nconst char* const fa_under_test = \"@FA_UNDER_TEST@\";\n")
  # A reader waits for this compilation after every save.
  set_source_files_properties(${replacements} PROPERTIES COMPILE_OPTIONS -O1)
  add_executable(${target} ${banner} ${objects} ${replacements})
  target_link_libraries(${target} PRIVATE fa_harness ${S_PREVIOUS})
endfunction()

# A stage that does not exist yet: registered, so that `ctest -R stage04` says so instead of nothing.
function(fa_planned_stage id about)
  set_property(GLOBAL APPEND PROPERTY FA_SUMMARY "${id}  not built yet (${about})")
  add_custom_target(stage${id}_all)
  if(BUILD_TESTING)
    add_test(NAME stage${id}.not_built_yet
      COMMAND ${CMAKE_COMMAND} -E echo "[  SKIPPED ] stage ${id}, ${about}: not built yet")
    set_tests_properties(stage${id}.not_built_yet PROPERTIES
      LABELS stage${id} SKIP_REGULAR_EXPRESSION "SKIPPED")
  endif()
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
