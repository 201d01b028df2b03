// The CUDA driver (libcuda.so.1): the few functions that torch's host code asks of it. There is one context.
#include <cuda.h>

static const CUcontext context = (CUcontext)0x1000;
extern "C" CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
extern "C" CUresult cuCtxGetCurrent(CUcontext* out) { *out = context; return CUDA_SUCCESS; }
extern "C" CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
