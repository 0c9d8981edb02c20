# Compiles the device code. Sets, for kernels/CMakeLists.txt:
#   SP_HIP_SOURCES        host sources that stand for HIP in this build
#   SP_HIP_OBJECT         the compiled kernels, empty without HIP
#   SP_HIP_LIBRARIES      what they need
# and, for tests/device, the cache entry SP_HIP_CLANG, the compiler, and the global properties
# SP_HIP_ROCM_ROOT and SP_HIP_TARGETS, its root and the architectures.
#
# One source file needs a device compiler, so it is compiled by a custom command; CMake's HIP
# language wants a ROCm installation of its own layout, which Debian's packages are not. The
# compiler needs a ROCm root: a real one (/opt/rocm, or SHARDPREP_ROCM_ROOT) or, with Debian's
# packages, a private one made by make_rocm_root.sh. SHARDPREP_HIP_ARCHITECTURES says what to
# compile for; configuring fails for one that the compiler does not know.
include(${CMAKE_CURRENT_LIST_DIR}/architectures.cmake)

set(SHARDPREP_ROCM_ROOT "" CACHE PATH "ROCm installation; empty: /opt/rocm or Debian's packages")
set(SHARDPREP_HIP_COMPILER "" CACHE FILEPATH "Compiler of the HIP kernels; empty: found")

set(SP_HIP_SOURCES hip/gpu_absent.cc)
set(SP_HIP_OBJECT "")
set(SP_HIP_LIBRARIES "")

# Sets ${root} to a usable ROCm root, or ${problem} to what is missing.
function(sp_find_rocm_root compiler root problem)
  set(${root} "" PARENT_SCOPE)
  if(SHARDPREP_ROCM_ROOT)
    set(${root} ${SHARDPREP_ROCM_ROOT} PARENT_SCOPE)
    return()
  endif()
  if(EXISTS /opt/rocm/include/hip/hip_runtime.h)
    set(${root} /opt/rocm PARENT_SCOPE)
    return()
  endif()
  set(private_root ${CMAKE_BINARY_DIR}/rocm_root)
  execute_process(COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/hip/make_rocm_root.sh ${compiler} ${private_root}
                  RESULT_VARIABLE result ERROR_VARIABLE message OUTPUT_QUIET)
  if(result EQUAL 0)
    set(${root} ${private_root} PARENT_SCOPE)
  else()
    string(STRIP "${message}" message)
    set(${problem} "${message}" PARENT_SCOPE)
  endif()
endfunction()

# Sets ${problem} to why HIP cannot be compiled, or leaves it empty and sets the SP_HIP_ variables.
function(sp_enable_hip problem)
  find_program(SP_HIP_CLANG NAMES ${SHARDPREP_HIP_COMPILER} amdclang++ clang++-19 clang++
               PATHS /opt/rocm/bin /opt/rocm/llvm/bin)
  if(NOT SP_HIP_CLANG)
    set(${problem} "no clang++ that compiles HIP" PARENT_SCOPE)
    return()
  endif()
  set(missing "")
  sp_find_rocm_root(${SP_HIP_CLANG} rocm_root missing)
  find_library(SP_AMDHIP64 amdhip64 HINTS ${rocm_root}/lib)
  find_path(SP_HIP_INCLUDE hip/hip_runtime_api.h HINTS ${rocm_root}/include)
  if(NOT missing AND NOT (SP_AMDHIP64 AND SP_HIP_INCLUDE))
    set(missing "no HIP runtime library or headers (libamdhip64-dev)")
  endif()
  if(missing)
    set(${problem} "${missing}" PARENT_SCOPE)
    return()
  endif()
  set(impossible "")
  sp_choose_hip_architectures(${SP_HIP_CLANG} ${rocm_root} "${SHARDPREP_HIP_ARCHITECTURES}"
                              targets impossible)
  if(impossible)
    message(FATAL_ERROR "SHARDPREP_HIP_ARCHITECTURES: ${impossible}")
  endif()
  list(TRANSFORM targets PREPEND --offload-arch= OUTPUT_VARIABLE offload)
  list(JOIN targets "," architecture_list)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/lane_launch.o)
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/hip/lane_launch.hip)
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${SP_HIP_CLANG} -x hip --rocm-path=${rocm_root} ${offload} -std=c++20 -O3 -fPIC -Wall
            -Wextra -Werror -I${CMAKE_SOURCE_DIR}
            "-DSHARDPREP_GPU_ARCHITECTURE_LIST=\"${architecture_list}\""
            -MD -MF ${object}.d -MT ${object} -c ${source} -o ${object}
    DEPENDS ${source}
    DEPFILE ${object}.d
    COMMENT "Compiling HIP kernels for ${architecture_list}"
    VERBATIM)
  set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  set_source_files_properties(hip/gpu_runtime.cc PROPERTIES
    COMPILE_DEFINITIONS __HIP_PLATFORM_AMD__ INCLUDE_DIRECTORIES ${SP_HIP_INCLUDE})
  message(STATUS "HIP: ${SP_HIP_CLANG}, root ${rocm_root}, for ${architecture_list}")
  set_property(GLOBAL PROPERTY SP_HIP_ROCM_ROOT ${rocm_root})
  set_property(GLOBAL PROPERTY SP_HIP_TARGETS ${targets})
  set(SP_HIP_SOURCES hip/gpu_runtime.cc PARENT_SCOPE)
  set(SP_HIP_OBJECT ${object} PARENT_SCOPE)
  set(SP_HIP_LIBRARIES ${SP_AMDHIP64} PARENT_SCOPE)
endfunction()

if(NOT SHARDPREP_HIP STREQUAL "OFF")
  set(hip_problem "")
  sp_enable_hip(hip_problem)
  if(hip_problem AND SHARDPREP_HIP STREQUAL "ON")
    message(FATAL_ERROR "SHARDPREP_HIP is ON, but: ${hip_problem}")
  elseif(hip_problem)
    message(STATUS "HIP: off, the CPU shuffles (${hip_problem})")
  endif()
endif()
