# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0

# cmake -D KIND=<one below> -D SOURCE=<repository> -D BUILD=<its build tree> -D WORK=<dir> -D CXX=<compiler>
#       -D NVCC=<nvcc or empty> -D GENERATOR=<generator> -D VERSION=<version> -P consumer.cmake
# Builds consumer/ as another project would, and runs it.
cmake_minimum_required(VERSION 3.25)
set(work "${WORK}/${KIND}")
file(REMOVE_RECURSE "${work}")
file(MAKE_DIRECTORY "${work}")
set(program "${SOURCE}/tests/build/consumer")
set(units "${program}/main.cpp" "${program}/second_unit.cpp")

# must(COMMAND...): its output goes to `output`; it ends the test if it fails.
function(must)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY "${work}" RESULT_VARIABLE status OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\n${output}\nexited with ${status}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(must_run executable)
  must("${executable}")
  string(STRIP "${output}" output)
  if(NOT output STREQUAL "heddle ${VERSION} works")
    message(FATAL_ERROR "${executable} printed: ${output}")
  endif()
  message("${KIND}: ${output}")
endfunction()

set(configure "${CMAKE_COMMAND}" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}")

if(KIND STREQUAL "fetch_content_directory")
  must(${configure} -S "${program}/fetch_content" -B build "-DHEDDLE_DIRECTORY=${SOURCE}")
  must("${CMAKE_COMMAND}" --build build)
  must_run("${work}/build/consumer")

elseif(KIND STREQUAL "fetch_content_git")
  execute_process(COMMAND git -C "${SOURCE}" rev-parse --verify HEAD RESULT_VARIABLE status OUTPUT_VARIABLE commit
                  ERROR_VARIABLE why)
  if(NOT status EQUAL 0)
    string(STRIP "${why}" why)
    message("SKIP: ${SOURCE} is no git checkout with a commit, so nothing to fetch (${why})")
    return()
  endif()
  string(STRIP "${commit}" commit)
  must(${configure} -S "${program}/fetch_content" -B build "-DHEDDLE_REPOSITORY=file://${SOURCE}"
       -DHEDDLE_COMMIT=${commit})
  must("${CMAKE_COMMAND}" --build build)
  must_run("${work}/build/consumer")

elseif(KIND STREQUAL "find_package")
  must("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${work}/prefix")
  set(find ${configure} -S "${program}/find_package" "-DCMAKE_PREFIX_PATH=${work}/prefix")
  must(${find} -B build -DHEDDLE_EXPECTED_VERSION=${VERSION})
  must("${CMAKE_COMMAND}" --build build)
  must_run("${work}/build/consumer")
  # Each component is either found, and then links, or refused with one sentence that names what it needs.
  foreach(component IN ITEMS cuda nccl mpi zmq quantum)
    execute_process(COMMAND ${find} -B ${component} -DHEDDLE_ASK_FOR=${component} WORKING_DIRECTORY "${work}"
                    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    string(REGEX REPLACE "[ \n]+" " " output "${output}") # CMake wraps lines
    if(status EQUAL 0)
      must("${CMAKE_COMMAND}" --build ${component})
      must_run("${work}/${component}/consumer")
      message("  with component ${component}")
    elseif(output MATCHES "(component ${component} (needs|does not exist)[^.]*)")
      message("  refused: ${CMAKE_MATCH_1}")
    else()
      message(FATAL_ERROR "find_package(heddle COMPONENTS ${component}) says\n${output}")
    endif()
  endforeach()
  if(NOT output MATCHES "component quantum does not exist")
    message(FATAL_ERROR "an unknown component must be refused:\n${output}")
  endif()

elseif(KIND STREQUAL "plain_compiler")
  must("${CXX}" -std=c++20 -Wall -Wextra -Werror -pthread -I "${SOURCE}/include" ${units} -o consumer)
  must_run("${work}/consumer")

elseif(KIND STREQUAL "plain_nvcc")
  if(NOT NVCC)
    message("SKIP: no nvcc, so nobody checked that the headers compile with it")
    return()
  endif()
  must("${NVCC}" -std=c++20 -Werror all-warnings -I "${SOURCE}/include" -x cu ${units} -o consumer)
  must_run("${work}/consumer")

else()
  message(FATAL_ERROR "no consumer of kind ${KIND}")
endif()
