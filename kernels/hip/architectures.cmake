# Which GPU architectures a compiler can compile for. Also read by tests/device.

# Sets ${problem} to why `compiler` with the ROCm root cannot compile for `architecture`, or to "".
function(sp_probe_hip_architecture compiler rocm_root architecture problem)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/hip_probe)
  file(WRITE ${folder}/empty.hip "__attribute__((global)) void Empty() {}\n")
  execute_process(
    COMMAND ${compiler} -x hip --rocm-path=${rocm_root} --offload-arch=${architecture} -nogpuinc
            --cuda-device-only -c ${folder}/empty.hip -o ${folder}/empty.o
    RESULT_VARIABLE result ERROR_VARIABLE message OUTPUT_QUIET)
  if(result EQUAL 0)
    set(${problem} "" PARENT_SCOPE)
  else()
    string(STRIP "${message}" message)
    set(${problem} "${compiler} cannot compile for '${architecture}': ${message}" PARENT_SCOPE)
  endif()
endfunction()

# Sets ${chosen} to the architectures to compile for: `wanted`, or when that is empty gfx90a, gfx942
# and, where the compiler knows it, gfx950. Sets ${problem} to why one of them is impossible, or "".
function(sp_choose_hip_architectures compiler rocm_root wanted chosen problem)
  set(${problem} "" PARENT_SCOPE)
  set(list ${wanted})
  if(NOT list)
    set(list gfx90a gfx942)
    sp_probe_hip_architecture(${compiler} ${rocm_root} gfx950 unknown)
    if(NOT unknown)
      list(APPEND list gfx950)
    endif()
  endif()
  foreach(architecture IN LISTS list)
    sp_probe_hip_architecture(${compiler} ${rocm_root} ${architecture} why)
    if(why)
      set(${problem} "${why}" PARENT_SCOPE)
    endif()
  endforeach()
  set(${chosen} ${list} PARENT_SCOPE)
endfunction()
