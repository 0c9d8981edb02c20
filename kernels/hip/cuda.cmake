# sp_gpu_cuda: the GPU runtime and the same kernels, compiled with CUDA under HIP's names
# (gpu_api.h), for checks on NVIDIA GPUs. Made where nvcc is installed; no binary that is shipped
# links it.
find_program(SP_NVCC nvcc HINTS /usr/local/cuda/bin)
if(NOT SP_NVCC OR SHARDPREP_SANITIZE)
  return()
endif()
get_filename_component(cuda_root ${SP_NVCC} REALPATH)
get_filename_component(cuda_root ${cuda_root}/../.. ABSOLUTE)
find_path(SP_CUDA_INCLUDE cuda_runtime_api.h HINTS ${cuda_root}/include)
find_library(SP_CUDART cudart_static HINTS ${cuda_root}/lib64)
if(NOT SP_CUDA_INCLUDE OR NOT SP_CUDART)
  return()
endif()

# Code for Ampere and Hopper, and PTX that a newer driver compiles for what came later.
set(cuda_targets -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=[sm_90,compute_90])
set(object ${CMAKE_CURRENT_BINARY_DIR}/lane_launch_cuda.o)
set(source ${CMAKE_CURRENT_SOURCE_DIR}/hip/lane_launch.hip)
add_custom_command(
  OUTPUT ${object}
  COMMAND ${SP_NVCC} -x cu -DSHARDPREP_GPU_CUDA "-DSHARDPREP_GPU_ARCHITECTURE_LIST=\"sm_80,sm_90\""
          ${cuda_targets} -std=c++20 -O3 -Xcompiler=-fPIC,-Wall -Werror=all-warnings
          -I${CMAKE_SOURCE_DIR} -MD -MF ${object}.d -MT ${object} -c ${source} -o ${object}
  DEPENDS ${source}
  DEPFILE ${object}.d
  COMMENT "Compiling the kernels with nvcc"
  VERBATIM)
set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
add_library(sp_gpu_cuda STATIC EXCLUDE_FROM_ALL hip/gpu_runtime.cc ${object})
target_compile_definitions(sp_gpu_cuda PRIVATE SHARDPREP_GPU_CUDA)
target_include_directories(sp_gpu_cuda SYSTEM PRIVATE ${SP_CUDA_INCLUDE})
target_link_libraries(sp_gpu_cuda PUBLIC sp_options absl::status absl::statusor absl::strings
                                         ${SP_CUDART} Threads::Threads ${CMAKE_DL_LIBS} rt)
message(STATUS "CUDA: ${SP_NVCC}, for checks only")
