# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0

# cmake -D CASE=<file.cpp> -D CXX=<compiler> -D INCLUDE=<dir> -P compile_fail.cmake
#
# The file has one line "// EXPECT: text" for each mistake that it shows. Without FAIL it must compile: the positive
# twin. With -DFAIL=1 for the first line, -DFAIL=2 for the second and so on it must not, and the first error that the
# compiler prints must contain the text: that is what a user reads. A line "// DEVICE" says that it needs CUDA's headers:
# it gets those of the emulated device.
cmake_minimum_required(VERSION 3.25)
set(ENV{LC_ALL} C) # ASCII quotes in the messages
file(STRINGS "${CASE}" expectations REGEX "^// EXPECT: ")
list(LENGTH expectations count)
if(count EQUAL 0)
  message(FATAL_ERROR "${CASE} has no line '// EXPECT: text'")
endif()

file(STRINGS "${CASE}" device REGEX "^// DEVICE$")
if(device)
  set(device -I "${INCLUDE}/../tests/emulated_device/include")
endif()
set(compile "${CXX}" -std=c++20 -Wall -Wextra -fno-diagnostics-show-caret -I "${INCLUDE}" ${device} -S -o /dev/null)
execute_process(COMMAND ${compile} -Werror "${CASE}" RESULT_VARIABLE status OUTPUT_VARIABLE output
                ERROR_VARIABLE output)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${CASE} must compile when FAIL is not defined:\n${output}")
endif()

set(number 0)
foreach(line IN LISTS expectations)
  math(EXPR number "${number} + 1")
  string(REGEX REPLACE "^// EXPECT: *" "" text "${line}")
  execute_process(COMMAND ${compile} -DFAIL=${number} "${CASE}" RESULT_VARIABLE status OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(status EQUAL 0)
    message(FATAL_ERROR "${CASE} compiles with -DFAIL=${number}, but should say: ${text}")
  endif()
  string(REGEX MATCH "error: [^\n]*" first "${output}")
  string(FIND "${first}" "${text}" position)
  if(position EQUAL -1)
    message(FATAL_ERROR "${CASE} with -DFAIL=${number}\nshould say first: ${text}\nbut says\n${output}")
  endif()
  message("-DFAIL=${number}: ${first}")
endforeach()
