# Finds the torch package that the operators are compiled against and defines the target torch::stable:
# its headers, and libtorch_cpu, which exports the stable ABI. Torch's own CMake package is not used: it
# would pull in every library, flag and definition of torch's C++ API, which the operators do not use.
#
#   FLASH_DMATTN_TORCH_DIR   the torch package (the folder that holds include/ and lib/); found through
#                            Python_EXECUTABLE when not set

set(FLASH_DMATTN_TORCH_DIR "" CACHE PATH "The torch package to compile against (default: that of the Python interpreter)")

set(torch_dir "${FLASH_DMATTN_TORCH_DIR}")
if(NOT torch_dir)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  # -E makes the interpreter ignore PYTHONPATH, through which pip hides the packages of the environment
  # it installs into from an isolated build: so the torch that will load the operators is found, and
  # no second one has to be downloaded for the build. Nothing is imported: that takes seconds.
  execute_process(
    COMMAND ${Python_EXECUTABLE} -E -c
      "from importlib.util import find_spec; s = find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
    OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT torch_dir)
  message(FATAL_ERROR
    "${Python_EXECUTABLE} has no torch: install torch>=${FLASH_DMATTN_TORCH_MINIMUM} first. (Tools that build "
    "in an environment of their own, as uv does, need --no-build-isolation; pip does not.)")
endif()

file(TO_CMAKE_PATH "${torch_dir}" torch_dir)
set(torch_version_header ${torch_dir}/include/torch/headeronly/version.h)
set(torch_library ${torch_dir}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}torch_cpu${CMAKE_SHARED_LIBRARY_SUFFIX})
set(torch_version "older than 2.9")  # the first release with that header
if(EXISTS ${torch_version_header})
  file(STRINGS ${torch_version_header} lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
  string(REGEX REPLACE "[^0-9;]" "" lines "${lines}")
  list(JOIN lines "." torch_version)
endif()
if(NOT torch_version VERSION_GREATER_EQUAL FLASH_DMATTN_TORCH_MINIMUM OR NOT EXISTS ${torch_library})
  message(FATAL_ERROR
    "torch in ${torch_dir} is ${torch_version}; needed: ${FLASH_DMATTN_TORCH_MINIMUM} or newer, with headers and ${torch_library}.")
endif()
message(STATUS "Found torch ${torch_version}: ${torch_dir}")

add_library(torch::stable SHARED IMPORTED)
set_target_properties(torch::stable PROPERTIES
  IMPORTED_LOCATION ${torch_library}
  INTERFACE_INCLUDE_DIRECTORIES ${torch_dir}/include
  INTERFACE_COMPILE_OPTIONS -fmacro-prefix-map=${torch_dir}/=)
