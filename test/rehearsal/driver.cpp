// The CUDA driver (libcuda.so.1): what the host code of torch, SGLang and Triton calls. There is one context, on one
// device. Compiled kernels are loaded without being read, and their launches are counted by the runtime.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <cstdio>
#include <cstring>

#define EXPORT extern "C"
EXPORT cudaError_t rehearsal_launch(cudaStream_t stream);
static const CUcontext context = (CUcontext)0x1000;
static CUresult of(cudaError_t error) { return (CUresult)error; }

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice* device, int) { *device = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int* number) { *number = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetName(char* name, int size, CUdevice) { snprintf(name, size, "rehearsal"); return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) { return of(cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, 0)); }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) { *out = context; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext* out) { *out = context; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice* device) { *device = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) { *text = cudaGetErrorString((cudaError_t)error); return CUDA_SUCCESS; }
EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  cudaPointerAttributes known;
  cudaPointerGetAttributes(&known, (void*)pointer);
  if (known.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  *(CUdeviceptr*)value = pointer;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) { *module = (CUmodule)8; return CUDA_SUCCESS; }
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { *function = (CUfunction)8; return CUDA_SUCCESS; }
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) { *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction, void**, void**) {
  dim3 grid(c->gridDimX, c->gridDimY, c->gridDimZ), block(c->blockDimX, c->blockDimY, c->blockDimZ);
  return of(cudaLaunchKernel(nullptr, grid, block, nullptr, c->sharedMemBytes, c->hStream));
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream, void** a, void** extra) {
  return of(cudaLaunchKernel(nullptr, dim3(gx, gy, gz), dim3(bx, by, bz), a, shared, stream));
}
EXPORT CUresult cuGetProcAddress_v2(const char* name, void** out, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  char second[128];
  snprintf(second, sizeof second, "%s_v2", name);
  *out = dlsym(RTLD_DEFAULT, second);
  if (!*out) *out = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
EXPORT CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle*) { return CUDA_SUCCESS; }
EXPORT CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
