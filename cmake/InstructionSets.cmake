# The CPU kernels: src/cpu/isa/<name>.cpp is one translation unit and one namespace per instruction
# set, compiled with the flags of this table; the backend picks one at run time. Everything else is
# compiled for the baseline of the target, and nothing with link-time optimization: either mix would
# let instructions of one set leak into code that runs on processors without them.
#
#   FLASH_DMATTN_INSTRUCTION_SETS   those to build, in ascending order; by default all of this kind of processor
#   FLASH_DMATTN_ISA_BUILT          those of them that the compiler supports

# Compile flags of all kernels. None may change the meaning of inf and NaN.
set(FLASH_DMATTN_KERNEL_FLAGS
  $<$<NOT:$<CONFIG:Debug>>:-O3>
  -fno-math-errno       # sqrt and similar functions need not set errno
  -fno-trapping-math    # the floating-point exception flags are not read
  -ffp-contract=off)    # fma() says what is fused, so that forward and backward round scores alike wherever they are inlined

set(FLASH_DMATTN_ISA_FLAGS_generic "")
set(FLASH_DMATTN_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(FLASH_DMATTN_ISA_FLAGS_avx512
  ${FLASH_DMATTN_ISA_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns about the undefined values that its own AVX-512 intrinsics start from (GCC bug 105593).
  list(APPEND FLASH_DMATTN_ISA_FLAGS_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(FLASH_DMATTN_ISA_FLAGS_avx512_bf16 ${FLASH_DMATTN_ISA_FLAGS_avx512} -mavx512bf16)
set(FLASH_DMATTN_ISA_FLAGS_amx_bf16 ${FLASH_DMATTN_ISA_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)

set(isa_known generic)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  list(APPEND isa_known avx2 avx512 avx512_bf16 amx_bf16)
endif()
set(FLASH_DMATTN_INSTRUCTION_SETS "${isa_known}" CACHE STRING "Instruction sets of the CPU kernels; generic is always among them")

foreach(isa IN LISTS FLASH_DMATTN_INSTRUCTION_SETS)
  if(NOT isa IN_LIST isa_known)
    message(FATAL_ERROR "FLASH_DMATTN_INSTRUCTION_SETS: got ${isa}, expected some of ${isa_known}")
  endif()
endforeach()
list(PREPEND FLASH_DMATTN_INSTRUCTION_SETS generic)
list(REMOVE_DUPLICATES FLASH_DMATTN_INSTRUCTION_SETS)

include(CheckCXXSourceCompiles)
set(FLASH_DMATTN_ISA_BUILT generic)
foreach(isa IN LISTS FLASH_DMATTN_INSTRUCTION_SETS)
  if(NOT isa STREQUAL "generic")
    # Compiled, not only tested for its flags: an old assembler fails only here.
    list(JOIN FLASH_DMATTN_ISA_FLAGS_${isa} " " CMAKE_REQUIRED_FLAGS)
    check_cxx_source_compiles("
      #include <immintrin.h>
      int main() {
      #if defined(__AMX_BF16__)
        _tile_release();
      #elif defined(__AVX512BF16__)
        (void)_mm512_cvtneps_pbh(_mm512_setzero_ps());
      #endif
      }" FLASH_DMATTN_COMPILER_HAS_${isa})
    unset(CMAKE_REQUIRED_FLAGS)
    if(FLASH_DMATTN_COMPILER_HAS_${isa})
      list(APPEND FLASH_DMATTN_ISA_BUILT ${isa})
    endif()
  endif()
endforeach()

# Adds DIRECTORY/<isa>.cpp to TARGET for every set in FLASH_DMATTN_ISA_BUILT and defines
# FLASH_DMATTN_HAVE_AVX2 and so on for DISPATCHER.
function(flash_dmattn_add_instruction_sets target directory dispatcher)
  foreach(isa IN LISTS FLASH_DMATTN_ISA_BUILT)
    set(source ${directory}/${isa}.cpp)
    target_sources(${target} PRIVATE ${source})
    set_source_files_properties(${source} PROPERTIES
      COMPILE_OPTIONS "${FLASH_DMATTN_KERNEL_FLAGS};${FLASH_DMATTN_ISA_FLAGS_${isa}}")
    string(TOUPPER "FLASH_DMATTN_HAVE_${isa}" definition)
    set_property(SOURCE ${dispatcher} APPEND PROPERTY COMPILE_DEFINITIONS ${definition}=1)
  endforeach()
  set_target_properties(${target} PROPERTIES INTERPROCEDURAL_OPTIMIZATION OFF)
  target_compile_options(${target} PRIVATE -fno-lto)
endfunction()
