// The CUDA driver (libcuda.so.1): what the host code of torch, SGLang and Triton calls. There is
// one context, on one device. Compiled kernels are loaded without being read, and their launches
// are counted by the runtime.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <cstdio>

#define EXPORT extern "C" CUresult
#define ANSWERS(name, type, answer) \
  EXPORT name(type* out) { return *out = answer, CUDA_SUCCESS; }
static const CUcontext context = (CUcontext)0x1000;

ANSWERS(cuDriverGetVersion, int, CUDA_VERSION)
ANSWERS(cuCtxGetCurrent, CUcontext, context)
EXPORT cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
EXPORT cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, 0);
}
EXPORT cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORT cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  cudaPointerAttributes known;
  cudaPointerGetAttributes(&known, (void*)pointer);
  if (known.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  *(CUdeviceptr*)value = pointer;
  return CUDA_SUCCESS;
}
EXPORT cuModuleLoadData(CUmodule* module, const void*) {
  return *module = (CUmodule)8, CUDA_SUCCESS;
}
EXPORT cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  return *function = (CUfunction)8, CUDA_SUCCESS;
}
EXPORT cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
EXPORT cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction, void**, void**) {
  dim3 grid(c->gridDimX, c->gridDimY, c->gridDimZ), block(c->blockDimX, c->blockDimY, c->blockDimZ);
  return (CUresult)cudaLaunchKernel(nullptr, grid, block, nullptr, c->sharedMemBytes, c->hStream);
}
EXPORT cuGetProcAddress_v2(const char* name, void** out, int, cuuint64_t,
                           CUdriverProcAddressQueryResult* result) {
  char second[128];
  snprintf(second, sizeof second, "%s_v2", name);
  *out = dlsym(RTLD_DEFAULT, second);
  if (!*out) *out = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
