# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
include_guard(GLOBAL)

# heddle_emulated(target sources.cu...): adds CUDA sources to a target, compiled as C++ against the emulated device.
function(heddle_emulated target)
  foreach(source IN LISTS ARGN)
    get_filename_component(source "${source}" ABSOLUTE)
    get_filename_component(name "${source}" NAME_WE)
    set(wrapper "${CMAKE_CURRENT_BINARY_DIR}/${target}_sources/${name}.cpp")
    file(CONFIGURE OUTPUT "${wrapper}" CONTENT "#include \"${source}\"\n" @ONLY)
    set_source_files_properties("${wrapper}" PROPERTIES OBJECT_DEPENDS "${source}")
    target_sources(${target} PRIVATE "${wrapper}")
  endforeach()
  target_link_libraries(${target} PRIVATE emulated_device)
  set_target_properties(${target} PROPERTIES ENABLE_EXPORTS ON) # kernels have names in messages
endfunction()

# heddle_device_executables(name [COMPONENT cuda|nccl] sources.cu...): from the same sources NAME_emulated, where there is
# the emulated device, and NAME_cuda, where there is the component (by default cuda) and its language is enabled.
function(heddle_device_executables name)
  cmake_parse_arguments(PARSE_ARGV 1 of "" COMPONENT "")
  set(component ${of_COMPONENT})
  if(NOT component)
    set(component cuda)
  endif()
  if(TARGET emulated_device)
    add_executable(${name}_emulated)
    heddle_emulated(${name}_emulated ${of_UNPARSED_ARGUMENTS})
  endif()
  if(TARGET heddle::${component})
    add_executable(${name}_cuda ${of_UNPARSED_ARGUMENTS})
    target_link_libraries(${name}_cuda PRIVATE heddle::${component})
  endif()
endfunction()
