// The few names of the HIP runtime that are used here, from HIP itself or, with
// SHARDPREP_GPU_CUDA, from CUDA under HIP's names. The product is built with HIP; with CUDA the
// same kernels are checked on the GPUs that are at hand (tests/device).
#pragma once

#if defined(SHARDPREP_GPU_CUDA)

#include <cuda_runtime_api.h>

#define hipDeviceProp_t cudaDeviceProp
#define hipError_t cudaError_t
#define hipStream_t cudaStream_t

#define hipSuccess cudaSuccess
#define hipErrorInsufficientDriver cudaErrorInsufficientDriver
#define hipErrorInvalidDevice cudaErrorInvalidDevice
#define hipErrorInvalidDeviceFunction cudaErrorInvalidDeviceFunction
#define hipErrorInvalidImage cudaErrorInvalidKernelImage
#define hipErrorInvalidKernelFile cudaErrorInvalidPtx
#define hipErrorInvalidValue cudaErrorInvalidValue
#define hipErrorNoBinaryForGpu cudaErrorNoKernelImageForDevice
#define hipErrorNoDevice cudaErrorNoDevice
#define hipErrorNotInitialized cudaErrorInitializationError
#define hipErrorOutOfMemory cudaErrorMemoryAllocation

#define hipMemcpyDeviceToDevice cudaMemcpyDeviceToDevice
#define hipMemcpyDeviceToHost cudaMemcpyDeviceToHost
#define hipMemcpyHostToDevice cudaMemcpyHostToDevice
#define hipHostMallocDefault cudaHostAllocDefault
#define hipHostRegisterDefault cudaHostRegisterDefault
#define hipStreamNonBlocking cudaStreamNonBlocking

#define hipDeviceGetPCIBusId cudaDeviceGetPCIBusId
#define hipFree cudaFree
#define hipGetDeviceCount cudaGetDeviceCount
#define hipGetDeviceProperties cudaGetDeviceProperties
#define hipGetErrorString cudaGetErrorString
#define hipHostFree cudaFreeHost
#define hipHostMalloc cudaHostAlloc
#define hipHostRegister cudaHostRegister
#define hipHostUnregister cudaHostUnregister
#define hipLaunchKernel cudaLaunchKernel
#define hipMalloc cudaMalloc
#define hipMemcpyAsync cudaMemcpyAsync
#define hipSetDevice cudaSetDevice
#define hipStreamCreateWithFlags cudaStreamCreateWithFlags
#define hipStreamDestroy cudaStreamDestroy
#define hipStreamSynchronize cudaStreamSynchronize

#else

#include <hip/hip_runtime_api.h>

#endif
