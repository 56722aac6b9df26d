// Stands between a program and NVIDIA's driver: it makes the n-th allocation fail as if memory were
// short, and counts what has been made and not given back.
//
//     cc -shared -fPIC -O2 -o cuda_faults.so tests/shims/cuda_faults.c -ldl
//     LD_PRELOAD=./cuda_faults.so program
//
// The program finds cuda_faults_arm and the others by dlsym and so goes through all n without being
// started anew. It sees calls that go through the dynamic linker, which is how cudarc calls the driver.
// cuBLAS, cuRAND and the CUDA runtime ask the driver itself for the addresses of its functions: what they
// allocate is neither counted nor made to fail.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
enum { SUCCESS = 0, OUT_OF_MEMORY = 2 };

// What there is of each kind, in the order in which cuda_faults_name gives their names.
enum kind { MEMORY, HOST, STREAM, GRAPH, EXECUTABLE, EVENT, MODULE, POOL, KINDS };
static const char *const NAMES[KINDS] = {"memory", "pinned memory", "streams",  "graphs",
                                         "executable graphs", "events", "modules", "pools"};

static atomic_long live[KINDS];
static atomic_long refused;  // Things that could not be given back.
static atomic_long calls;    // Allocations since the last arming.
static atomic_long wanted;   // The one that fails, counted from 1; 0 for none.
static atomic_int onwards;   // Whether all after it fail too.
static _Atomic(const char *) first;

// Has allocation `n` from now on fail, and all after it if `all` is not 0; none for 0.
void cuda_faults_arm(long n, int all) {
  atomic_store(&wanted, 0);
  atomic_store(&calls, 0);
  atomic_store(&onwards, all);
  atomic_store(&first, NULL);
  atomic_store(&wanted, n);
}

// The driver's function that failed first since the last arming; null if none did.
const char *cuda_faults_failed(void) { return atomic_load(&first); }

// Allocations since the last arming.
long cuda_faults_calls(void) { return atomic_load(&calls); }

// How many of a kind there are, -1 past the last kind.
long cuda_faults_live(int kind) { return kind >= 0 && kind < KINDS ? atomic_load(&live[kind]) : -1; }

const char *cuda_faults_name(int kind) { return kind >= 0 && kind < KINDS ? NAMES[kind] : NULL; }

// How often the driver did not take something back: what was never there, or was given back before.
long cuda_faults_refused(void) { return atomic_load(&refused); }

static int fails(const char *name) {
  long n = atomic_fetch_add(&calls, 1) + 1, at = atomic_load(&wanted);
  if (at == 0 || n < at || (n > at && !atomic_load(&onwards))) return 0;
  const char *none = NULL;
  atomic_compare_exchange_strong(&first, &none, name);
  return 1;
}

static void *next(const char *name) {
  void *function = dlsym(RTLD_NEXT, name);
  if (function == NULL) {
    fprintf(stderr, "cuda_faults: no %s behind this library\n", name);
    abort();
  }
  return function;
}

static CUresult made(CUresult result, enum kind kind) {
  if (result == SUCCESS) atomic_fetch_add(&live[kind], 1);
  return result;
}

static CUresult gone(CUresult result, enum kind kind) {
  if (result == SUCCESS)
    atomic_fetch_sub(&live[kind], 1);
  else
    atomic_fetch_add(&refused, 1);
  return result;
}

#define CALL(name, types, values) (((CUresult(*) types)next(#name)) values)

#define ALLOCATES(name, kind, types, values)   \
  CUresult name types {                        \
    if (fails(#name)) return OUT_OF_MEMORY;    \
    return made(CALL(name, types, values), kind); \
  }

// Made, but not made to fail: where an event is refused, cudarc 0.19 loses the memory that it was for.
#define MAKES(name, kind, types, values) \
  CUresult name types { return made(CALL(name, types, values), kind); }

#define FREES(name, kind, types, values) \
  CUresult name types { return gone(CALL(name, types, values), kind); }

ALLOCATES(cuMemAlloc_v2, MEMORY, (CUdeviceptr * at, size_t bytes), (at, bytes))
ALLOCATES(cuMemAllocAsync, MEMORY, (CUdeviceptr * at, size_t bytes, void *stream), (at, bytes, stream))
ALLOCATES(cuMemAllocFromPoolAsync, MEMORY, (CUdeviceptr * at, size_t bytes, void *pool, void *stream),
          (at, bytes, pool, stream))
ALLOCATES(cuMemAllocManaged, MEMORY, (CUdeviceptr * at, size_t bytes, unsigned flags), (at, bytes, flags))
ALLOCATES(cuMemAllocPitch_v2, MEMORY,
          (CUdeviceptr * at, size_t *pitch, size_t width, size_t height, unsigned element),
          (at, pitch, width, height, element))
FREES(cuMemFree_v2, MEMORY, (CUdeviceptr at), (at))
FREES(cuMemFreeAsync, MEMORY, (CUdeviceptr at, void *stream), (at, stream))

ALLOCATES(cuMemHostAlloc, HOST, (void **at, size_t bytes, unsigned flags), (at, bytes, flags))
ALLOCATES(cuMemAllocHost_v2, HOST, (void **at, size_t bytes), (at, bytes))
FREES(cuMemFreeHost, HOST, (void *at), (at))

ALLOCATES(cuStreamCreate, STREAM, (void **stream, unsigned flags), (stream, flags))
ALLOCATES(cuStreamCreateWithPriority, STREAM, (void **stream, unsigned flags, int priority),
          (stream, flags, priority))
FREES(cuStreamDestroy_v2, STREAM, (void *stream), (stream))

FREES(cuGraphDestroy, GRAPH, (void *graph), (graph))
ALLOCATES(cuGraphInstantiateWithFlags, EXECUTABLE, (void **executable, void *graph, unsigned long long flags),
          (executable, graph, flags))
FREES(cuGraphExecDestroy, EXECUTABLE, (void *executable), (executable))

MAKES(cuEventCreate, EVENT, (void **event, unsigned flags), (event, flags))
FREES(cuEventDestroy_v2, EVENT, (void *event), (event))

ALLOCATES(cuModuleLoadData, MODULE, (void **module, const void *image), (module, image))
FREES(cuModuleUnload, MODULE, (void *module), (module))

ALLOCATES(cuMemPoolCreate, POOL, (void **pool, const void *properties), (pool, properties))
FREES(cuMemPoolDestroy, POOL, (void *pool), (pool))

// A capture that came to nothing gives no graph.
CUresult cuStreamEndCapture(void *stream, void **graph) {
  CUresult result = CALL(cuStreamEndCapture, (void *stream, void **graph), (stream, graph));
  if (result == SUCCESS && *graph != NULL) atomic_fetch_add(&live[GRAPH], 1);
  return result;
}
