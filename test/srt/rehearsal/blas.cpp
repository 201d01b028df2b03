// cuBLAS and cuBLASLt, as far as torch calls them for Gemma 4: a product is one launch on the
// stream of its handle. Functions whose other arguments do not matter here are written with "...":
// arguments are passed alike on x86-64.
#include <cuda_runtime_api.h>
#include <cstring>

extern "C" cudaError_t rehearsal_launch(cudaStream_t stream);
struct Handle {
  cudaStream_t stream;
};
static char object[256];  // what nobody looks into

#define ANSWERS_ZERO(name) \
  extern "C" int name(void*, int* out) { return *out = 0; }
#define MAKES_AN_OBJECT(name) \
  extern "C" int name(void** out, ...) { return *out = object, 0; }
#define LAUNCHES(name) \
  extern "C" int name(Handle* handle, ...) { return launch(handle->stream); }

static int launch(cudaStream_t stream) {
  return rehearsal_launch(stream) ? 13 : 0;  // CUBLAS_STATUS_EXECUTION_FAILED
}
extern "C" int cublasCreate_v2(Handle** out) { return *out = new Handle{}, 0; }
extern "C" int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
  return handle->stream = stream, 0;
}
ANSWERS_ZERO(cublasGetMathMode)
LAUNCHES(cublasGemmEx)
LAUNCHES(cublasSgemm_v2)
LAUNCHES(cublasGemmStridedBatchedEx)
MAKES_AN_OBJECT(cublasLtCreate)
MAKES_AN_OBJECT(cublasLtMatmulDescCreate)
MAKES_AN_OBJECT(cublasLtMatrixLayoutCreate)
MAKES_AN_OBJECT(cublasLtMatmulPreferenceCreate)
extern "C" int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                              void* found, int* number) {
  memset(found, 0, 128);  // less than one result: status 0 of the first
  *number = 1;
  return 0;
}
extern "C" int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                              void*, void*, void*, void*, size_t, cudaStream_t stream) {
  return launch(stream);
}
