// The parts of CUDA's runtime that fastdist and its tests use, declared for virtual GPUs with the
// names and numbers of NVIDIA's header. Source: docs.nvidia.com/cuda/cuda-runtime-api.
#pragma once

#include <stddef.h>

#define VIRTUAL_GPU_EXPORT extern "C" __attribute__((visibility("default")))

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureMerge = 902,
  cudaErrorStreamCaptureUnmatched = 903,
  cudaErrorStreamCaptureUnjoined = 904,
  cudaErrorStreamCaptureIsolation = 905,
  cudaErrorStreamCaptureImplicit = 906,
  cudaErrorCapturedEvent = 907,
  cudaErrorStreamCaptureWrongThread = 908,
};

enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
};

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};

enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2,
};

inline constexpr unsigned cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaEventDisableTiming = 2;

struct cudaUUID_t {
  char bytes[16];
};

struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  size_t totalGlobalMem;
  int major;
  int minor;
  int multiProcessorCount;
  int pciDomainID;
  int pciBusID;
  int pciDeviceID;
};

VIRTUAL_GPU_EXPORT cudaError_t cudaRuntimeGetVersion(int* version);
VIRTUAL_GPU_EXPORT const char* cudaGetErrorName(cudaError_t error);
VIRTUAL_GPU_EXPORT const char* cudaGetErrorString(cudaError_t error);
VIRTUAL_GPU_EXPORT cudaError_t cudaGetLastError();

VIRTUAL_GPU_EXPORT cudaError_t cudaGetDeviceCount(int* count);
VIRTUAL_GPU_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
VIRTUAL_GPU_EXPORT cudaError_t cudaGetDevice(int* device);
VIRTUAL_GPU_EXPORT cudaError_t cudaSetDevice(int device);
VIRTUAL_GPU_EXPORT cudaError_t cudaDeviceSynchronize();
VIRTUAL_GPU_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);

VIRTUAL_GPU_EXPORT cudaError_t cudaMalloc(void** data, size_t bytes);
VIRTUAL_GPU_EXPORT cudaError_t cudaFree(void* data);
VIRTUAL_GPU_EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* all);
VIRTUAL_GPU_EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes,
                                          cudaMemcpyKind kind);
VIRTUAL_GPU_EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                                               cudaMemcpyKind kind, cudaStream_t stream);
VIRTUAL_GPU_EXPORT cudaError_t cudaMemset(void* to, int value, size_t bytes);
VIRTUAL_GPU_EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes,
                                               cudaStream_t stream);

VIRTUAL_GPU_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
VIRTUAL_GPU_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                                            int priority);
VIRTUAL_GPU_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream);
VIRTUAL_GPU_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream);
VIRTUAL_GPU_EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream);
VIRTUAL_GPU_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                                   unsigned flags);

VIRTUAL_GPU_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
VIRTUAL_GPU_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event);
VIRTUAL_GPU_EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
VIRTUAL_GPU_EXPORT cudaError_t cudaEventQuery(cudaEvent_t event);
VIRTUAL_GPU_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event);

VIRTUAL_GPU_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
VIRTUAL_GPU_EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream,
                                                      cudaStreamCaptureMode mode);
VIRTUAL_GPU_EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
VIRTUAL_GPU_EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                                    unsigned long long flags);
VIRTUAL_GPU_EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
VIRTUAL_GPU_EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph);
VIRTUAL_GPU_EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
