# A test that stands for one that cannot be built: skipped with its reason, or failed if a GPU is
# required.
if("$ENV{FA_REQUIRE_GPU}" STREQUAL "1")
  message(FATAL_ERROR "not built: ${REASON}")
endif()
message("[  SKIPPED ] not built: ${REASON}")
