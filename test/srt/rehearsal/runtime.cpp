// A CUDA runtime (libcudart.so.13) for a machine without a GPU, so that torch's own CUDA code runs.
//
// What it models, each with the part of the CUDA documentation that has the rule (R: CUDA Runtime
// API, P: CUDA C++ Programming Guide):
//  - device memory: addresses that fault when the host touches them, and its end (R, Memory
//    Management; R, Unified Addressing);
//  - copies, made at once: the host waits for one to or from pageable memory (R, API
//    synchronization behavior);
//  - streams, whether the legacy one waits for them (R, Stream synchronization behavior; R, Stream
//    Management), events, and who waits for them (R, Event Management);
//  - a capture's mode, and calls that it does not permit (R, cudaThreadExchangeStreamCaptureMode),
//    streams that join it, and events of others (P, Cross-stream Dependencies and Events), what is
//    asked of a captured stream or event, and the legacy stream meanwhile (P, Prohibited and
//    Unhandled Operations), captures that are broken (P, Invalidation);
//  - the limits of a launch (P, Compute Capabilities, Technical Specifications).
// What it does not model: what kernels compute (they are counted), time, the driver's own memory
// and failures, several devices, NCCL, the order of work in different streams (a listener hears
// what is needed to follow it: races.py).
// A function that is not written ends the process with its name; without_effect.json names those
// that only return success.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#define EXPORT extern "C"
#define CUDA extern "C" cudaError_t
using u64 = unsigned long long;
using Guard = std::lock_guard<std::recursive_mutex>;

static std::recursive_mutex mutex;
static thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t fail(cudaError_t error) { return last_error = error; }
static cudaError_t stop(const char* what, int number) {
  fprintf(stderr, "rehearsal: %s %d is not written\n", what, number);
  _exit(70);
}

// ---- what happened: each kind is counted, and a listener hears of those from HOST_WAIT on
enum Kind { LAUNCH, COPY, HOST_WAIT, GRAPH_LAUNCH, PINNING, EVENT_RECORD, EVENT_WAIT, KINDS };
using Listener = void (*)(int kind, const char* what, u64 stream, u64 handle);
static std::atomic<u64> counters[KINDS];
static Listener listener;
// It may call Python: never while ``mutex`` is held, which another Python thread may wait for.
static cudaError_t note(Kind kind, const char* what = "", const void* stream = nullptr,
                        const void* handle = nullptr) {
  counters[kind]++;
  if (listener && kind >= HOST_WAIT) listener(kind, what, (u64)stream, (u64)handle);
  return cudaSuccess;
}
EXPORT u64 rehearsal_count(int kind) { return counters[kind]; }
EXPORT void rehearsal_listen(Listener heard) { listener = heard; }

// ---- streams and captures
using Graph = u64;  // how many nodes it has
struct Capture {
  Graph* graph;
  cudaStreamCaptureMode mode;
  u64 thread;  // the address of its mode
  struct Stream* origin;
  bool broken = false;
};
struct Stream {
  bool blocking;  // ordered with the legacy stream
  Capture* capture = nullptr;
  u64 work = 0;
  bool joined = true;
};
struct Event {
  Stream* stream = nullptr;
  Capture* capture = nullptr;
  u64 work = 0;
  bool recorded = false;
};
static Stream legacy{true};
static std::set<Stream*> streams{&legacy};
static std::set<Capture*> captures;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static Stream* stream_of(cudaStream_t s) { return (u64)s <= 2 ? &legacy : (Stream*)s; }
static cudaError_t break_capture(Capture* capture, cudaError_t error) {
  capture->broken = true;
  return fail(error);
}
// A call that may be unsafe while a stream is captured (cudaStreamCaptureMode).
static cudaError_t unsafe_call() {
  Guard guard(mutex);
  for (Capture* capture : captures) {
    // Of both modes the laxer one counts: global (0), thread-local (1), relaxed (2).
    int mode = capture->mode > thread_mode ? capture->mode : thread_mode;
    bool own = capture->thread == (u64)&thread_mode;
    if (mode == cudaStreamCaptureModeGlobal || (mode == cudaStreamCaptureModeThreadLocal && own))
      return break_capture(capture, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}
// Work is put on a stream; ``captured`` says whether it is only noted in a graph.
static cudaError_t enqueue(cudaStream_t handle, bool* captured) {
  Guard guard(mutex);
  Stream* stream = stream_of(handle);
  *captured = stream->capture != nullptr;
  stream->work++;
  if (stream->capture) {
    if (stream->capture->broken) return fail(cudaErrorStreamCaptureInvalidated);
    ++*stream->capture->graph;
    stream->joined = stream == stream->capture->origin;
  } else if (stream == &legacy) {
    for (Capture* capture : captures)
      if (capture->origin->blocking) return break_capture(capture, cudaErrorStreamCaptureImplicit);
  }
  return cudaSuccess;
}

CUDA cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int) {
  Guard guard(mutex);
  Stream* made = new Stream{!(flags & cudaStreamNonBlocking)};
  streams.insert(made);
  *out = (cudaStream_t)made;
  return cudaSuccess;
}
CUDA cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
CUDA cudaStreamSynchronize(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  if (stream->capture) return break_capture(stream->capture, cudaErrorStreamCaptureUnsupported);
  if (stream == &legacy && unsafe_call()) return last_error;
  return note(HOST_WAIT, "stream", handle);
}
CUDA cudaDeviceSynchronize() {
  if (unsafe_call()) return last_error;
  return note(HOST_WAIT, "device");
}

// ---- events
static bool is_open(Capture* capture) { return captures.count(capture) > 0; }
CUDA cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = (cudaEvent_t) new Event;
  return cudaSuccess;
}
CUDA cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
CUDA cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  {
    Guard guard(mutex);
    Stream* stream = stream_of(on);
    if (stream->capture && stream->capture->broken) return fail(cudaErrorStreamCaptureInvalidated);
    *(Event*)handle = Event{stream, stream->capture, stream->work, true};
  }
  return note(EVENT_RECORD, "", on, handle);
}
CUDA cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
static cudaError_t wait_for_event(cudaStream_t handle, cudaEvent_t waited) {
  Guard guard(mutex);
  Stream* stream = stream_of(handle);
  Event* event = (Event*)waited;
  if (!event->recorded) return cudaSuccess;
  if (!is_open(event->capture) && !stream->capture) return cudaSuccess;
  if (!is_open(event->capture))
    return break_capture(stream->capture, cudaErrorStreamCaptureIsolation);
  if (stream->capture && stream->capture != event->capture) {
    event->capture->broken = true;
    return break_capture(stream->capture, cudaErrorStreamCaptureMerge);
  }
  if (!stream->capture) {
    stream->capture = event->capture;
    stream->joined = false;
  }
  if (event->stream != stream && event->stream->work == event->work) event->stream->joined = true;
  return cudaSuccess;
}
CUDA cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (wait_for_event(stream, event)) return last_error;
  return note(EVENT_WAIT, "", stream, event);
}
static cudaError_t ask_event(cudaEvent_t handle) {
  Guard guard(mutex);
  Event* event = (Event*)handle;
  if (is_open(event->capture)) return break_capture(event->capture, cudaErrorCapturedEvent);
  return unsafe_call();
}
// All work is done when it is asked for: a query always finds it done, and orders as a wait does.
CUDA cudaEventQuery(cudaEvent_t event) {
  if (ask_event(event)) return last_error;
  return note(EVENT_WAIT, "host", nullptr, event);
}
CUDA cudaEventSynchronize(cudaEvent_t event) {
  if (ask_event(event)) return last_error;
  return note(HOST_WAIT, "event", nullptr, event);
}

// ---- graphs
CUDA cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
CUDA cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Guard guard(mutex);
  Stream* stream = stream_of(handle);
  if (stream->capture || stream == &legacy) return fail(cudaErrorStreamCaptureUnsupported);
  stream->capture = new Capture{new Graph{0}, mode, (u64)&thread_mode, stream};
  captures.insert(stream->capture);
  return cudaSuccess;
}
CUDA cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Guard guard(mutex);
  Capture* capture = stream_of(handle)->capture;
  *graph = nullptr;
  if (!capture) return fail(cudaErrorIllegalState);
  bool all_joined = true;
  for (Stream* stream : streams) {
    if (stream->capture != capture) continue;
    all_joined = all_joined && (stream == capture->origin || stream->joined);
    stream->capture = nullptr;
    stream->joined = true;
  }
  captures.erase(capture);
  if (capture->broken) return fail(cudaErrorStreamCaptureInvalidated);
  if (!all_joined) return fail(cudaErrorStreamCaptureUnjoined);
  *graph = (cudaGraph_t)capture->graph;
  return cudaSuccess;
}
CUDA cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, u64* id,
                              cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                              const cudaGraphEdgeData** edges, size_t* number) {
  Guard guard(mutex);
  Capture* capture = stream_of(handle)->capture;
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (capture && capture->broken) *status = cudaStreamCaptureStatusInvalidated;
  if (id) *id = (u64)capture;
  if (graph) *graph = capture ? (cudaGraph_t)capture->graph : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (number) *number = 0;
  return cudaSuccess;
}
CUDA cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
CUDA cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, u64) {
  if (unsafe_call()) return last_error;
  *out = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
CUDA cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  bool captured;
  if (enqueue(stream, &captured)) return last_error;
  return note(GRAPH_LAUNCH, "", stream, graph);
}
// The graph that is captured on the stream, or 0.
EXPORT u64 rehearsal_captured_graph(u64 stream) {
  Guard guard(mutex);
  Capture* capture = stream_of((cudaStream_t)stream)->capture;
  return capture ? (u64)capture->graph : 0;
}
CUDA cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  *number = *(Graph*)graph;
  return cudaSuccess;
}

// ---- memory: device addresses are mapped without access, and beside them for the host's view
static const size_t ARENA = (size_t)1 << 39, TOTAL = (size_t)80 << 30, PAGE = 2 << 20;
static char *device_base, *host_base;
static size_t top = PAGE, used;
static std::map<char*, size_t> blocks, pinned;
static std::multimap<size_t, char*> freed;

static const int HOW = MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
static char* map_arena(u64 address, int access, int file) {
  void* at = mmap((void*)address, ARENA, access, HOW, file, 0);
  if (at == MAP_FAILED) stop("device memory after error", errno);
  return (char*)at;
}
__attribute__((constructor)) static void make_arena() {
  int file = memfd_create("rehearsal", 0);
  if (file < 0 || ftruncate(file, ARENA)) stop("device memory after error", errno);
  device_base = map_arena(0x600000000000, PROT_NONE, file);
  host_base = map_arena(0x680000000000, PROT_READ | PROT_WRITE, file);
}
static bool on_device(const void* p) { return p >= device_base && p < device_base + ARENA; }
static char* host_view(const void* p) {
  return on_device(p) ? host_base + ((char*)p - device_base) : (char*)p;
}
static bool inside(const std::map<char*, size_t>& known, const void* p, size_t bytes) {
  Guard guard(mutex);
  auto after = known.upper_bound((char*)p);
  if (after == known.begin()) return false;
  --after;
  return (char*)p + bytes <= after->first + after->second;
}
static bool is_valid(const void* p, size_t size) {
  return !on_device(p) || inside(blocks, p, size);
}
static bool is_pageable(const void* p) { return !on_device(p) && !inside(pinned, p, 1); }
EXPORT u64 rehearsal_host_offset() { return host_base - device_base; }
EXPORT int rehearsal_is_pinned(u64 p) { return inside(pinned, (void*)p, 1); }

CUDA cudaMalloc(void** out, size_t bytes) {
  Guard guard(mutex);
  if (unsafe_call()) return last_error;
  size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  if (used + size > TOTAL || top + size > ARENA) return fail(cudaErrorMemoryAllocation);
  if (!freed.count(size)) {
    freed.emplace(size, device_base + top);
    top += size;
  }
  auto same = freed.find(size);
  char* block = same->second;
  freed.erase(same);
  blocks[block] = size;
  used += size;
  *out = block;
  return cudaSuccess;
}
static cudaError_t free_block(char* p) {
  Guard guard(mutex);
  if (unsafe_call()) return last_error;
  auto block = blocks.find(p);
  if (block == blocks.end()) return fail(cudaErrorInvalidValue);
  madvise(host_view(p), block->second, MADV_REMOVE);
  used -= block->second;
  freed.emplace(block->second, block->first);
  blocks.erase(block);
  return cudaSuccess;
}
CUDA cudaFree(void* p) {
  if (p && free_block((char*)p)) return last_error;
  return p ? note(HOST_WAIT, "device") : cudaSuccess;
}
CUDA cudaMemGetInfo(size_t* available, size_t* total) {
  *available = TOTAL - used;
  *total = TOTAL;
  return cudaSuccess;
}
CUDA cudaHostAlloc(void** out, size_t bytes, unsigned) {
  if (unsafe_call()) return last_error;
  if (posix_memalign(out, 4096, bytes)) return fail(cudaErrorMemoryAllocation);
  note(PINNING);
  Guard guard(mutex);
  pinned[(char*)*out] = bytes;
  return cudaSuccess;
}
CUDA cudaFreeHost(void* p) {
  Guard guard(mutex);
  if (!pinned.erase((char*)p)) return fail(cudaErrorInvalidValue);
  free(p);
  return cudaSuccess;
}
CUDA cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  a->type = on_device(p) ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  if (is_pageable(p)) a->type = cudaMemoryTypeUnregistered;
  if (!is_pageable(p)) a->devicePointer = (void*)p;
  if (!on_device(p)) a->hostPointer = (void*)p;
  return cudaSuccess;
}
CUDA cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                     cudaStream_t stream) {
  bool captured;
  if (enqueue(stream, &captured)) return last_error;
  if (!is_valid(to, bytes) || !is_valid(from, bytes)) return fail(cudaErrorIllegalAddress);
  note(COPY);
  if (captured) return cudaSuccess;
  memmove(host_view(to), host_view(from), bytes);
  if (is_pageable(to)) return note(HOST_WAIT, "stream", stream);
  return is_pageable(from) ? note(HOST_WAIT, "pageable source", stream) : cudaSuccess;
}
CUDA cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  bool captured;
  if (enqueue(stream, &captured)) return last_error;
  if (!is_valid(p, bytes)) return fail(cudaErrorIllegalAddress);
  if (!captured) memset(host_view(p), value, bytes);
  return cudaSuccess;
}

// ---- the device: an H100's limits under a name of its own
CUDA cudaGetDeviceCount(int* number) { return *number = 1, cudaSuccess; }
CUDA cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
CUDA cudaSetDevice(int device) { return device ? fail(cudaErrorInvalidDevice) : cudaSuccess; }
static int architecture() {
  const char* chosen = getenv("REHEARSAL_SM");
  return chosen ? atoi(chosen) : 90;
}
// Attribute and property: kHz and bits stand beside Triton's kernels, where nobody reads them.
#define LIMITS(LIMIT)                                                                \
  LIMIT(ComputeCapabilityMajor, major, architecture() / 10)                          \
  LIMIT(ComputeCapabilityMinor, minor, architecture() % 10)                          \
  LIMIT(MultiProcessorCount, multiProcessorCount, architecture() == 100 ? 148 : 132) \
  LIMIT(MaxThreadsPerBlock, maxThreadsPerBlock, 1024)                                \
  LIMIT(MaxThreadsPerMultiProcessor, maxThreadsPerMultiProcessor, 2048)              \
  LIMIT(MaxBlockDimX, maxThreadsDim[0], 1024)                                        \
  LIMIT(MaxBlockDimY, maxThreadsDim[1], 1024)                                        \
  LIMIT(MaxBlockDimZ, maxThreadsDim[2], 64)                                          \
  LIMIT(MaxGridDimX, maxGridSize[0], 2147483647)                                     \
  LIMIT(MaxGridDimY, maxGridSize[1], 65535)                                          \
  LIMIT(MaxGridDimZ, maxGridSize[2], 65535)                                          \
  LIMIT(MaxSharedMemoryPerBlock, sharedMemPerBlock, 49152)                           \
  LIMIT(MaxSharedMemoryPerBlockOptin, sharedMemPerBlockOptin, 232448)                \
  LIMIT(MaxSharedMemoryPerMultiprocessor, sharedMemPerMultiprocessor, 233472)        \
  LIMIT(MaxRegistersPerBlock, regsPerBlock, 65536)                                   \
  LIMIT(L2CacheSize, l2CacheSize, 50 << 20)                                          \
  LIMIT(WarpSize, warpSize, 32)                                                      \
  LIMIT(ClockRate, reserved[0], 1)                                                   \
  LIMIT(MemoryClockRate, reserved[0], 1)                                             \
  LIMIT(GlobalMemoryBusWidth, memoryBusWidth, 1)
CUDA cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
#define CASE(attribute, property, limit) \
  case cudaDevAttr##attribute:           \
    return *value = limit, cudaSuccess;
  switch (attribute) {
    LIMITS(CASE)
    default:
      return stop("attribute", attribute);
  }
}
CUDA cudaGetDeviceProperties(cudaDeviceProp* p, int) {
#define SET(attribute, property, limit) p->property = limit;
  memset(p, 0, sizeof *p);
  strcpy(p->name, "rehearsal");
  p->totalGlobalMem = TOTAL;
  LIMITS(SET)
  return cudaSuccess;
}
CUDA cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
CUDA cudaPeekAtLastError() { return last_error; }
EXPORT const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[32];
  snprintf(text, sizeof text, "CUDA error %d", (int)error);
  return text;
}
CUDA cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, u64,
                                      cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  *out = dlsym(driver, name);
  if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- kernels: counted, not run (the functions that nvcc's code calls)
static thread_local cudaLaunchConfig_t pushed;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                            cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
CUDA __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.gridDim, *block = pushed.blockDim, *shared = pushed.dynamicSmemBytes;
  *(cudaStream_t*)stream = pushed.stream;
  return cudaSuccess;
}
// Also for libraries and kernels whose launch is not of this file.
CUDA rehearsal_launch(cudaStream_t stream) {
  bool captured;
  if (enqueue(stream, &captured)) return last_error;
  return note(LAUNCH);
}
CUDA cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t shared,
                      cudaStream_t stream) {
  u64 threads = (u64)block.x * block.y * block.z, blocks = (u64)grid.x * grid.y * grid.z;
  bool fits = grid.y <= 65535 && grid.z <= 65535 && threads <= 1024 && shared <= 232448;
  if (!fits || !threads || !blocks) return fail(cudaErrorInvalidConfiguration);
  return rehearsal_launch(stream);
}
CUDA cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) {
  return cudaLaunchKernel(f, c->gridDim, c->blockDim, a, c->dynamicSmemBytes, c->stream);
}
CUDA cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->maxDynamicSharedSizeBytes = 232448;
  a->binaryVersion = a->ptxVersion = architecture();
  return cudaSuccess;
}
CUDA cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                            unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
CUDA __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
CUDA __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** a, size_t shared,
                        cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, a, shared, stream);
}
