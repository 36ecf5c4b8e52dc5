# Run by ctest: see cuda_is_left_out in CMakeLists.txt. An nvcc, of which only the name is used, beside a CMake that
# cannot give it C++20: AUTO warns and names the off-switch, OFF is silent, ON fails.
file(REMOVE_RECURSE ${WORK_DIR})
file(WRITE ${WORK_DIR}/nvcc "#!/bin/sh\nexit 1\n")
file(CHMOD ${WORK_DIR}/nvcc PERMISSIONS OWNER_READ OWNER_EXECUTE)
file(WRITE ${WORK_DIR}/old.cmake "set(CMAKE_VERSION 3.25.1)\n")
set(lacks "CMake 3.25.1 lacks C\\+\\+20 for CUDA")

function(configure cuda expect_success expected)
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${WORK_DIR}/${cuda} -G ${GENERATOR}
    -D CMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -D CMAKE_CXX_COMPILER=${CXX}
    -D CMAKE_CUDA_COMPILER=${WORK_DIR}/nvcc -D CMAKE_PROJECT_INCLUDE=${WORK_DIR}/old.cmake
    -D FLASH_DMATTN_CUDA=${cuda} --no-warn-unused-cli
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(expect_success AND NOT status EQUAL 0 OR NOT expect_success AND status EQUAL 0)
    message(FATAL_ERROR "FLASH_DMATTN_CUDA=${cuda} ended with ${status}:\n${output}")
  endif()
  string(REGEX REPLACE "[ \n]+" " " output "${output}")  # CMake breaks lines
  if(expected AND NOT output MATCHES "${expected}")
    message(FATAL_ERROR "FLASH_DMATTN_CUDA=${cuda}: expected ${expected}\n${output}")
  elseif(NOT expected AND output MATCHES "Warning")
    message(FATAL_ERROR "FLASH_DMATTN_CUDA=${cuda}: expected no warning\n${output}")
  endif()
endfunction()

configure(AUTO TRUE "CMake Warning.*${lacks}.*FLASH_DMATTN_CUDA=OFF")
configure(OFF TRUE "")
configure(ON FALSE "CMake Error.*${lacks}")
