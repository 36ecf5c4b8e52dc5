# flash_dmattn_compiler_options(TARGET): what every target of this project is compiled with.
#
# Never -ffast-math or a part of it that changes results: the handling of inf and NaN is specified.

set(FLASH_DMATTN_WARNINGS
  -Wall -Wextra -Wpedantic
  -Wno-missing-field-initializers    # members that are not named have their defaults
  -Wconversion -Wno-sign-conversion  # indices are signed, sizes of containers are not
  -Wdouble-promotion
  -Wshadow
  -Wold-style-cast
  -Wcast-qual
  -Wnon-virtual-dtor
  -Wextra-semi
  -Wundef)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 sees overlapping copies in std::string's own operator+ (GCC bug 105651).
  list(APPEND FLASH_DMATTN_WARNINGS -Wno-restrict)
endif()

function(flash_dmattn_compiler_options target)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)
  target_compile_options(${target} PRIVATE
    ${FLASH_DMATTN_WARNINGS}
    -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)  # no path of the build machine in __FILE__
  if(FLASH_DMATTN_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(FLASH_DMATTN_SANITIZE)
    # PUBLIC: whatever links the library has to bring the same runtime.
    target_compile_options(${target} PUBLIC -fsanitize=address,undefined)
    target_compile_options(${target} PRIVATE -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=address,undefined)
  endif()
endfunction()

# flash_dmattn_oracle_sources(SOURCE...): files of the calling folder that compute what results are compared with. With
# FLASH_DMATTN_SANITIZE they are optimised and not instrumented, as otherwise the tests would spend nearly all their time in them.
function(flash_dmattn_oracle_sources)
  if(FLASH_DMATTN_SANITIZE)
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "-O3;-fno-sanitize=all")
  endif()
endfunction()
