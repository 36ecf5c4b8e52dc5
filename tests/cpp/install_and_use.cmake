# Run by ctest: see install_and_use in CMakeLists.txt.
file(REMOVE_RECURSE ${WORK_DIR})
set(step COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)

execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --config ${CONFIG}
  --prefix ${WORK_DIR}/prefix --component cpp ${step})
execute_process(COMMAND ${CMAKE_COMMAND} -S ${EXAMPLE_DIR} -B ${WORK_DIR}/build -G ${GENERATOR}
  -D CMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_BUILD_TYPE=${CONFIG}
  -D "CMAKE_CXX_FLAGS=-Wall -Wextra -Wconversion -Werror" -D CMAKE_NO_SYSTEM_FROM_IMPORTED=ON
  -D CMAKE_PREFIX_PATH=${WORK_DIR}/prefix ${step})
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK_DIR}/build --config ${CONFIG} ${step})
foreach(example flash_dmattn_example flash_dmattn_decode)
  execute_process(COMMAND ${EMULATOR} ${WORK_DIR}/build/${example} ${step})
endforeach()
