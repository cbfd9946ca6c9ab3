# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0

# cmake -D DOXYGEN=<program> -D SOURCE=<repository> -D WORK=<dir> -P doxygen.cmake
# Runs docs/Doxyfile without writing pages; any warning fails.
cmake_minimum_required(VERSION 3.25)
if(NOT DOXYGEN)
  message("SKIP: no doxygen, so nobody checked the documentation comments (apt-get install doxygen)")
  return()
endif()
file(MAKE_DIRECTORY "${WORK}")
file(READ "${SOURCE}/docs/Doxyfile" settings)
file(WRITE "${WORK}/Doxyfile" "${settings}\nOUTPUT_DIRECTORY = ${WORK}\nGENERATE_HTML = NO\nGENERATE_XML = YES\n")
execute_process(COMMAND "${DOXYGEN}" "${WORK}/Doxyfile" WORKING_DIRECTORY "${SOURCE}" RESULT_VARIABLE status
                OUTPUT_VARIABLE output ERROR_VARIABLE warnings)
string(STRIP "${warnings}" warnings)
if(NOT status EQUAL 0 OR NOT warnings STREQUAL "")
  string(REPLACE "${SOURCE}/" "" warnings "${warnings}")
  message(FATAL_ERROR "${warnings}\ndoxygen exited with ${status}")
endif()
message("doxygen has no warning")
