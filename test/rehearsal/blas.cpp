// cuBLAS and cuBLASLt, as far as torch calls them for Gemma 4: a product is one launch on the stream of its handle.
// Functions whose other arguments do not matter here are written with "...": arguments are passed alike on x86-64.
#include <cuda_runtime_api.h>
#include <cstdlib>
#include <cstring>

extern "C" cudaError_t rehearsal_launch(cudaStream_t stream);
struct Handle { cudaStream_t stream; };
static int launch(cudaStream_t stream) { return rehearsal_launch(stream) ? 13 : 0; }  // CUBLAS_STATUS_EXECUTION_FAILED

#define SETS_NOTHING(name) extern "C" int name(...) { return 0; }
#define ANSWERS_ZERO(name) extern "C" int name(void*, int* out) { *out = 0; return 0; }
#define MAKES_AN_OBJECT(name) extern "C" int name(void** out, ...) { *out = calloc(1, 256); return 0; }
#define FREES_AN_OBJECT(name) extern "C" int name(void* object) { free(object); return 0; }
#define LAUNCHES(name) extern "C" int name(Handle* handle, ...) { return launch(handle->stream); }

MAKES_AN_OBJECT(cublasCreate_v2)
FREES_AN_OBJECT(cublasDestroy_v2)
extern "C" int cublasSetStream_v2(Handle* handle, cudaStream_t stream) { handle->stream = stream; return 0; }
SETS_NOTHING(cublasSetWorkspace_v2)
SETS_NOTHING(cublasSetMathMode)
ANSWERS_ZERO(cublasGetMathMode)
SETS_NOTHING(cublasSetPointerMode_v2)
ANSWERS_ZERO(cublasGetPointerMode_v2)
LAUNCHES(cublasGemmEx)
LAUNCHES(cublasSgemm_v2)
LAUNCHES(cublasGemmStridedBatchedEx)

MAKES_AN_OBJECT(cublasLtCreate)
MAKES_AN_OBJECT(cublasLtMatmulDescCreate)
FREES_AN_OBJECT(cublasLtMatmulDescDestroy)
SETS_NOTHING(cublasLtMatmulDescSetAttribute)
MAKES_AN_OBJECT(cublasLtMatrixLayoutCreate)
FREES_AN_OBJECT(cublasLtMatrixLayoutDestroy)
MAKES_AN_OBJECT(cublasLtMatmulPreferenceCreate)
FREES_AN_OBJECT(cublasLtMatmulPreferenceDestroy)
SETS_NOTHING(cublasLtMatmulPreferenceSetAttribute)
extern "C" int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* found, int* number) {
  memset(found, 0, 128);  // less than one result: status 0 of the first
  *number = 1;
  return 0;
}
extern "C" int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                              void*, size_t, cudaStream_t stream) {
  return launch(stream);
}
