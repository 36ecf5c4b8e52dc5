# Run by ctest: see cuda_is_left_out in CMakeLists.txt. AUTO leaves the CUDA kernels out where there is no GPU, and where
# they cannot be built: it warns then, and names the off-switch. OFF is silent, ON fails.
file(REMOVE_RECURSE ${WORK_DIR})
file(WRITE ${WORK_DIR}/gpu "")

# An nvcc of that release which compiles nothing, as with a host compiler that it does not support.
function(write_nvcc release)
  file(WRITE ${WORK_DIR}/${release}/nvcc "#!/bin/sh\n[ \"$1\" = --version ] && echo release ${release}, V${release}.1\n")
  file(CHMOD ${WORK_DIR}/${release}/nvcc PERMISSIONS OWNER_READ OWNER_EXECUTE)
endfunction()

# gpu: a device, whose file has to exist for AUTO.
function(configure cuda gpu nvcc expect_success expected)
  set(ENV{CUDACXX} ${nvcc})
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${WORK_DIR}/build -G ${GENERATOR}
    -D CMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -D CMAKE_CXX_COMPILER=${CXX} -D FLASH_DMATTN_CUDA=${cuda}
    -D FLASH_DMATTN_GPU_DEVICE=${gpu}
    -U CMAKE_CUDA_* -U CMAKE_PROJECT_INCLUDE ${ARGN}  # of the calls before the C++ compiler stays, as identified
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(expect_success AND NOT status EQUAL 0 OR NOT expect_success AND status EQUAL 0)
    message(FATAL_ERROR "FLASH_DMATTN_CUDA=${cuda} ended with ${status}:\n${output}")
  endif()
  string(REGEX REPLACE "[ \n]+" " " output "${output}")  # CMake breaks lines
  if(NOT output MATCHES "${expected}")
    message(FATAL_ERROR "FLASH_DMATTN_CUDA=${cuda}: expected ${expected}\n${output}")
  elseif(NOT expected MATCHES "^CMake" AND output MATCHES "Warning")
    message(FATAL_ERROR "FLASH_DMATTN_CUDA=${cuda}: expected no warning\n${output}")
  endif()
endfunction()

function(expect_left_out reason nvcc)
  configure(AUTO ${WORK_DIR}/gpu ${nvcc} TRUE "CMake Warning.*${reason}.*FLASH_DMATTN_CUDA=OFF" ${ARGN})
  configure(ON ${WORK_DIR}/no_gpu ${nvcc} FALSE "CMake Error.*${reason}" ${ARGN})
endfunction()

write_nvcc(12.4)
expect_left_out("nvcc 12.4 is too old, 12.5 or newer is needed" ${WORK_DIR}/12.4/nvcc)
write_nvcc(13.0)
expect_left_out("13.0/nvcc fails with this host compiler" ${WORK_DIR}/13.0/nvcc)
# A CMake that cannot give nvcc C++20.
file(WRITE ${WORK_DIR}/old.cmake "set(CMAKE_VERSION 3.25.1)\n")
expect_left_out("CMake 3.25.1 lacks C\\+\\+20 for CUDA" ${WORK_DIR}/13.0/nvcc -D CMAKE_PROJECT_INCLUDE=${WORK_DIR}/old.cmake)
configure(AUTO ${WORK_DIR}/no_gpu ${WORK_DIR}/13.0/nvcc TRUE "CUDA off: there is no GPU here .*FLASH_DMATTN_CUDA=ON")
configure(OFF ${WORK_DIR}/gpu ${WORK_DIR}/13.0/nvcc TRUE "CUDA off")
