// A CUDA runtime (libcudart.so.13) for a machine without a GPU, so that torch's own CUDA code runs.
//
// What it models, each with the part of the CUDA documentation that has the rule:
//  - device memory: addresses that fault when the host touches them; its end is "out of memory" (Runtime API, Memory
//    Management);
//  - copies, made at once; one to or from pageable memory makes the host wait (Runtime API, API synchronization
//    behavior);
//  - streams and events, and who waits for them (Runtime API, Stream Management and Event Management);
//  - stream capture: modes and calls that are not permitted (Runtime API, cudaStreamCaptureMode), joined streams,
//    events of other captures (Programming Guide, "Cross-stream Dependencies and Events"), the legacy stream
//    ("Prohibited and Unhandled Operations"), a broken capture ("Invalidation").
// What it does not model: what kernels compute (they are counted), time, the driver's own memory and failures, NCCL,
// the order of work in different streams (a listener hears what is needed to follow it: races.py).
// A function that is not written ends the process with its name.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <dlfcn.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
using u64 = unsigned long long;
using Guard = std::lock_guard<std::recursive_mutex>;

static std::recursive_mutex mutex;
static thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

// ---- what happened: each kind is counted, and a listener hears of those from HOST_WAIT on
enum Kind { LAUNCH, COPY, DEVICE_ALLOCATION, HOST_WAIT, GRAPH_LAUNCH, PINNED_ALLOCATION, EVENT_RECORD, EVENT_WAIT, KINDS };
using Listener = void (*)(int kind, const char* what, u64 stream, u64 handle);
static std::atomic<u64> counters[KINDS];
static Listener listener;
// It may call Python: never while ``mutex`` is held, which a thread that has Python's lock may wait for.
static void note(Kind kind, const char* what = "", const void* stream = nullptr, const void* handle = nullptr) {
  counters[kind]++;
  if (listener && kind >= HOST_WAIT) listener(kind, what, (u64)stream, (u64)handle);
}
EXPORT u64 rehearsal_count(int kind) { return counters[kind]; }
EXPORT void rehearsal_listen(Listener heard) { listener = heard; }

// ---- streams and captures
struct Graph { u64 nodes = 0; };
struct Capture {
  Graph* graph;
  cudaStreamCaptureMode mode;
  u64 thread, id;
  struct Stream* origin;
  bool broken = false;
};
struct Stream {
  bool blocking;  // ordered with the legacy stream
  int priority;
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
static Stream legacy{true, 0};
static std::set<Stream*> streams{&legacy};
static std::set<Capture*> captures;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static u64 last_id = 0;

static Stream* stream_of(cudaStream_t handle) { return (u64)handle <= 2 ? &legacy : (Stream*)handle; }
static u64 this_thread() { return (u64)&thread_mode; }
static cudaError_t break_capture(Capture* capture, cudaError_t error) {
  capture->broken = true;
  return fail(error);
}
// A call that may be unsafe while a stream is captured (cudaStreamCaptureMode).
static cudaError_t unsafe_call() {
  Guard guard(mutex);
  for (Capture* capture : captures) {
    bool by_any = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    bool relaxed = capture->mode == cudaStreamCaptureModeRelaxed || thread_mode == cudaStreamCaptureModeRelaxed;
    if (by_any || (!relaxed && capture->thread == this_thread())) return break_capture(capture, cudaErrorStreamCaptureUnsupported);
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
    stream->capture->graph->nodes++;
    stream->joined = stream == stream->capture->origin;
  } else if (stream == &legacy) {
    for (Capture* capture : captures)
      if (capture->origin->blocking) return break_capture(capture, cudaErrorStreamCaptureImplicit);
  }
  return cudaSuccess;
}

static cudaError_t make_stream(cudaStream_t* out, unsigned flags, int priority) {
  Guard guard(mutex);
  Stream* made = new Stream{!(flags & cudaStreamNonBlocking), priority};
  streams.insert(made);
  *out = (cudaStream_t)made;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return make_stream(out, flags, 0); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) { return make_stream(out, flags, priority); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) { *priority = stream_of(handle)->priority; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
static cudaError_t ask_stream(cudaStream_t handle) {
  Guard guard(mutex);
  Stream* stream = stream_of(handle);
  if (stream->capture) return break_capture(stream->capture, cudaErrorStreamCaptureUnsupported);
  return stream == &legacy ? unsafe_call() : cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (ask_stream(stream)) return last_error;
  note(HOST_WAIT, "stream", stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return ask_stream(stream); }
EXPORT cudaError_t cudaDeviceSynchronize() {
  if (unsafe_call()) return last_error;
  note(HOST_WAIT, "device");
  return cudaSuccess;
}

// ---- events
static bool is_open(Capture* capture) { return captures.count(capture) > 0; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) { *out = (cudaEvent_t) new Event; return cudaSuccess; }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { delete (Event*)event; return cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  {
    Guard guard(mutex);
    Stream* stream = stream_of(on);
    if (stream->capture && stream->capture->broken) return fail(cudaErrorStreamCaptureInvalidated);
    *(Event*)handle = Event{stream, stream->capture, stream->work, true};
  }
  note(EVENT_RECORD, "", on, handle);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
static cudaError_t wait_for_event(cudaStream_t handle, cudaEvent_t waited) {
  Guard guard(mutex);
  Stream* stream = stream_of(handle);
  Event* event = (Event*)waited;
  if (!event->recorded) return cudaSuccess;
  if (!is_open(event->capture)) return stream->capture ? break_capture(stream->capture, cudaErrorStreamCaptureIsolation) : cudaSuccess;
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
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (wait_for_event(stream, event)) return last_error;
  note(EVENT_WAIT, "", stream, event);
  return cudaSuccess;
}
static cudaError_t ask_event(cudaEvent_t handle) {
  Guard guard(mutex);
  Event* event = (Event*)handle;
  if (is_open(event->capture)) return break_capture(event->capture, cudaErrorCapturedEvent);
  return unsafe_call();
}
// All work is done when it is asked for, so a query always finds it done; what it orders is as after a wait.
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (ask_event(event)) return last_error;
  note(EVENT_WAIT, "host", nullptr, event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (ask_event(event)) return last_error;
  note(HOST_WAIT, "event", nullptr, event);
  return cudaSuccess;
}

// ---- graphs
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { std::swap(*mode, thread_mode); return cudaSuccess; }
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Guard guard(mutex);
  Stream* stream = stream_of(handle);
  if (stream->capture || stream == &legacy) return fail(cudaErrorStreamCaptureUnsupported);
  stream->capture = new Capture{new Graph, mode, this_thread(), ++last_id, stream};
  captures.insert(stream->capture);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
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
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, u64* id, cudaGraph_t* graph,
                                            const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* number) {
  Guard guard(mutex);
  Capture* capture = stream_of(handle)->capture;
  *status = !capture ? cudaStreamCaptureStatusNone : capture->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? (cudaGraph_t)capture->graph : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (number) *number = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, u64) {
  if (unsafe_call()) return last_error;
  *out = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, u64 flags) { return cudaGraphInstantiate(out, graph, flags); }
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  bool captured;
  if (enqueue(stream, &captured)) return last_error;
  note(GRAPH_LAUNCH, "", stream, graph);
  return cudaSuccess;
}
// The graph that is captured on the stream, or 0.
EXPORT u64 rehearsal_captured_graph(u64 stream) {
  Guard guard(mutex);
  Capture* capture = stream_of((cudaStream_t)stream)->capture;
  return capture ? (u64)capture->graph : 0;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) { *number = ((Graph*)graph)->nodes; return cudaSuccess; }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

// ---- memory: device addresses are mapped without access; the host's view of the same memory lies beside them
static const size_t ARENA = (size_t)1 << 39, TOTAL = (size_t)80 << 30, PAGE = 2 << 20;
static char *device_base, *host_base;
static size_t top = PAGE, used;
static std::map<char*, size_t> blocks, pinned;
static std::multimap<size_t, char*> freed;

static char* map_arena(u64 address, int access, int file) {
  void* at = mmap((void*)address, ARENA, access, MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, file, 0);
  if (at == MAP_FAILED) { perror("rehearsal: device memory"); _exit(70); }
  return (char*)at;
}
__attribute__((constructor)) static void make_arena() {
  int file = memfd_create("rehearsal", 0);
  if (file < 0 || ftruncate(file, ARENA)) { perror("rehearsal: device memory"); _exit(70); }
  device_base = map_arena(0x600000000000, PROT_NONE, file);
  host_base = map_arena(0x680000000000, PROT_READ | PROT_WRITE, file);
}
static bool on_device(const void* p) { return (char*)p >= device_base && (char*)p < device_base + ARENA; }
static char* host_view(const void* p) { return on_device(p) ? host_base + ((char*)p - device_base) : (char*)p; }
static bool inside(const std::map<char*, size_t>& known, const void* p, size_t bytes) {
  Guard guard(mutex);
  auto after = known.upper_bound((char*)p);
  if (after == known.begin()) return false;
  --after;
  return (char*)p + bytes <= after->first + after->second;
}
static bool is_valid(const void* p, size_t bytes) { return !on_device(p) || inside(blocks, p, bytes); }
static bool is_pageable(const void* p) { return !on_device(p) && !inside(pinned, p, 1); }
EXPORT u64 rehearsal_host_offset() { return host_base - device_base; }
EXPORT u64 rehearsal_used_bytes() { return used; }
EXPORT int rehearsal_is_pinned(u64 p) { return inside(pinned, (void*)p, 1); }

EXPORT cudaError_t cudaMalloc(void** out, size_t bytes) {
  Guard guard(mutex);
  if (unsafe_call()) return last_error;
  size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  if (used + size > TOTAL) return fail(cudaErrorMemoryAllocation);
  auto same = freed.find(size);
  char* block = same == freed.end() ? device_base + top : same->second;
  if (same == freed.end()) top += size;
  else freed.erase(same);
  if (top > ARENA) return fail(cudaErrorMemoryAllocation);
  blocks[block] = size;
  used += size;
  *out = block;
  note(DEVICE_ALLOCATION);
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
EXPORT cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  if (free_block((char*)p)) return last_error;
  note(HOST_WAIT, "device");
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* available, size_t* total) { *available = TOTAL - used; *total = TOTAL; return cudaSuccess; }
EXPORT cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  if (unsafe_call()) return last_error;
  if (posix_memalign(out, 4096, bytes)) return fail(cudaErrorMemoryAllocation);
  {
    Guard guard(mutex);
    pinned[(char*)*out] = bytes;
  }
  note(PINNED_ALLOCATION);
  return cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void* p) {
  Guard guard(mutex);
  if (!pinned.erase((char*)p)) return fail(cudaErrorInvalidValue);
  free(p);
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  a->type = on_device(p) ? cudaMemoryTypeDevice : is_pageable(p) ? cudaMemoryTypeUnregistered : cudaMemoryTypeHost;
  if (!is_pageable(p)) a->devicePointer = (void*)p;
  if (!on_device(p)) a->hostPointer = (void*)p;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  bool captured;
  if (enqueue(stream, &captured)) return last_error;
  if (!is_valid(to, bytes) || !is_valid(from, bytes)) return fail(cudaErrorIllegalAddress);
  note(COPY);
  if (captured) return cudaSuccess;
  memmove(host_view(to), host_view(from), bytes);
  if (is_pageable(to)) note(HOST_WAIT, "stream", stream);
  else if (is_pageable(from)) note(HOST_WAIT, "pageable source", stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (unsafe_call() || cudaMemcpyAsync(to, from, bytes, kind, nullptr)) return last_error;
  note(HOST_WAIT, "device");
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  bool captured;
  if (enqueue(stream, &captured)) return last_error;
  if (!is_valid(p, bytes)) return fail(cudaErrorIllegalAddress);
  if (!captured) memset(host_view(p), value, bytes);
  return cudaSuccess;
}

// ---- the device: an H100's limits under a name of its own
EXPORT cudaError_t cudaGetDeviceCount(int* number) { *number = 1; return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) { return device ? fail(cudaErrorInvalidDevice) : cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
static int architecture() {
  const char* chosen = getenv("REHEARSAL_SM");
  return chosen ? atoi(chosen) : 90;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "rehearsal");
  p->major = architecture() / 10;
  p->minor = architecture() % 10;
  p->totalGlobalMem = TOTAL;
  p->multiProcessorCount = p->major == 10 ? 148 : 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  p->unifiedAddressing = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetLastError() { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORT const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[32];
  snprintf(text, sizeof text, "CUDA error %d", (int)error);
  return text;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, u64, cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  *out = driver ? dlsym(driver, name) : nullptr;
  if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** out, u64 flags, cudaDriverEntryPointQueryResult* result) { return cudaGetDriverEntryPointByVersion(name, out, CUDART_VERSION, flags, result); }
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrClockRate: *value = 1; break;  // kHz; Triton puts them beside a kernel, nobody reads them
    case cudaDevAttrMemoryClockRate: *value = 1; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 1; break;
    default: fprintf(stderr, "rehearsal: attribute %d is not written\n", (int)attribute); _exit(70);
  }
  return cudaSuccess;
}

// ---- kernels: counted, not run (the functions that nvcc's code calls)
struct Launch { dim3 grid, block; size_t shared; cudaStream_t stream; };
static thread_local std::vector<Launch> launches;
EXPORT void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) { launches.push_back({grid, block, shared, stream}); return 0; }
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Launch launch = launches.back();
  launches.pop_back();
  *grid = launch.grid;
  *block = launch.block;
  *shared = launch.shared;
  *(cudaStream_t*)stream = launch.stream;
  return cudaSuccess;
}
// Also for libraries and kernels whose launch is not of this file.
EXPORT cudaError_t rehearsal_launch(cudaStream_t stream) {
  bool captured;
  if (enqueue(stream, &captured)) return last_error;
  note(LAUNCH);
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  u64 threads = (u64)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024 || grid.y > 65535 || grid.z > 65535 || shared > 232448) return fail(cudaErrorInvalidConfiguration);
  return rehearsal_launch(stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) { return cudaLaunchKernel(f, c->gridDim, c->blockDim, a, c->dynamicSmemBytes, c->stream); }
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->maxDynamicSharedSizeBytes = 232448;
  a->binaryVersion = a->ptxVersion = architecture();
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) { *blocks = 2; return cudaSuccess; }
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** a, size_t shared, cudaStream_t stream) { return cudaLaunchKernel(kernel, grid, block, a, shared, stream); }
