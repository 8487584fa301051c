// What an H200 can do at the most where a grouped GEMM is bound by power and by L2.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a workloads/ceilings.cu -o ceilings
//   ./ceilings
//
// First its tensor cores multiply bfloat16 numbers, drawn at random, that lie in shared memory, in
// tiles of 256 rows of weights by some rows of tokens: while nothing is loaded, while each stage is
// loaded anew from L2, and while the weights come from memory, each once. Such a loop has no results
// to store and no tile to end. Then blocks only load from L2.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <cuda_runtime.h>
#include <vector>

constexpr int SMS = 132;
enum Load { NOTHING, FROM_L2, FROM_MEMORY };

static __device__ __forceinline__ unsigned shared(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
static __device__ void init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
static __device__ __forceinline__ void wait(unsigned barrier, int phase) {
  asm volatile(
      "{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@p bra D;\nbra L;\nD:\n}" ::"r"(barrier), "r"(phase)
      : "memory");
}
static __device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
static __device__ __forceinline__ void expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
static __device__ __forceinline__ void copy(unsigned to, const char* from, int bytes,
                                            unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
static __device__ __forceinline__ unsigned long long descriptor(unsigned address) {
  return static_cast<unsigned long long>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 |
         1ull << 62;
}
static __device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Sums of a thread, 4 at a time, as operands of an instruction.
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
template <int rows> struct Product;
#define PRODUCT(ROWS, REGISTERS, A, B, ...)                                                     \
  template <> struct Product<ROWS> {                                                            \
    static __device__ __forceinline__ void start(float* d, unsigned long long a,                \
                                                 unsigned long long b) {                        \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32.bf16.bf16 {" REGISTERS     \
                   "}, %" #A ", %" #B ", 1, 1, 1, 0, 0;"                                         \
                   : __VA_ARGS__                                                                \
                   : "l"(a), "l"(b));                                                           \
    }                                                                                           \
  };
#define R52                                                                                    \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"       \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"     \
  "%46,%47,%48,%49,%50,%51"
#define R64 R52 ",%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R80 R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
PRODUCT(104, R52, 52, 53, F16(0), F16(16), F16(32), F4(48))
PRODUCT(128, R64, 64, 65, F16(0), F16(16), F16(32), F16(48))
PRODUCT(160, R80, 80, 81, F16(0), F16(16), F16(32), F16(48), F16(64))

constexpr int WEIGHTS = 256, STAGES = 4, MATH = 256;

template <int rows> __device__ __forceinline__ void hold(float (&sums)[2][rows / 2]) {
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < rows / 2; j++) asm volatile("" : "+f"(sums[i][j])::"memory");
}

template <int rows>
__global__ void __launch_bounds__(MATH + 128, 1)
    multiply(const char* few, size_t few_bytes, const char* many, size_t many_bytes, int steps,
             int load, float* out, long long* cycles) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
  constexpr int STAGE = (WEIGHTS + rows) * 128;
  int thread = threadIdx.x;
  char* base = (char*)(((size_t)memory + 1023) / 1024 * 1024);
  for (int i = thread; i < STAGE * STAGES / 16; i += MATH + 128)
    ((uint4*)base)[i] = ((const uint4*)few)[i];
  if (thread == 0)
    for (int i = 0; i < STAGES; i++) {
      init(shared(&barriers[i]), 1);
      init(shared(&barriers[STAGES + i]), 2);
    }
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (thread >= MATH) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == MATH) {
      for (int s = 0; s < steps; s++) {
        int slot = s % STAGES, phase = (s / STAGES) & 1;
        wait(shared(&barriers[STAGES + slot]), phase ^ 1);
        unsigned full = shared(&barriers[slot]);
        if (load) {  // from L2, two blocks read the same weights, and others the same rows
          size_t at, row;
          if (load == FROM_L2)
            at = ((size_t)(blockIdx.x / 2) * 1315423911ull + (size_t)s * 65536) %
                 (few_bytes - STAGE);
          else
            at = ((size_t)blockIdx.x * (size_t)(5000 * 1024) * 4 + (size_t)s * WEIGHTS * 128) %
                 (many_bytes - STAGE);
          at = at / 1024 * 1024;
          row = ((size_t)(blockIdx.x % 2) * 2654435761ull + (size_t)s * 32768) %
                (few_bytes - STAGE);
          row = row / 1024 * 1024;
          const char* weights = load == FROM_L2 ? few : many;
          expect(full, STAGE);
          copy(shared(base + slot * STAGE), weights + at, WEIGHTS * 128, full);
          copy(shared(base + slot * STAGE + WEIGHTS * 128), few + row, rows * 128, full);
        } else {
          arrive(full);
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float sums[2][rows / 2];
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < rows / 2; j++) sums[i][j] = 0;
    int group = thread / 128;
    long long start = clock64();
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
      int slot = s % STAGES, phase = (s / STAGES) & 1;
      wait(shared(&barriers[slot]), phase);
      unsigned weights = shared(base + slot * STAGE) + group * (WEIGHTS / 2) * 128;
      unsigned tokens = shared(base + slot * STAGE + WEIGHTS * 128);
      hold<rows>(sums);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          Product<rows>::start(sums[half], descriptor(weights + half * 8192 + k * 32),
                               descriptor(tokens + k * 32));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      hold<rows>(sums);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (s > 0 && thread % 128 == 0) arrive(shared(&barriers[STAGES + (s - 1) % STAGES]));
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold<rows>(sums);
    if (thread == 0) cycles[blockIdx.x] = clock64() - start;
    float sum = 0;
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < rows / 2; j++) sum += sums[i][j];
    if (sum == 123.456f) out[thread] = sum;  // never; but the compiler cannot know
  }
}

constexpr int LOADS = 6, BOX = 256 * 128, COLUMNS = 32;

// Blocks of a cluster read the same boxes of 256 rows of 128 bytes; with `multicast` each loads a
// part for all of them.
template <int cluster, bool multicast>
__global__ void __launch_bounds__(64, 1)
    load(const __grid_constant__ CUtensorMap map, int steps, int share, long long* cycles) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ __align__(8) unsigned long long barriers[2 * LOADS];
  char* base = (char*)(((size_t)memory + 1023) / 1024 * 1024);
  int thread = threadIdx.x, reader = blockIdx.x / share;
  unsigned rank = blockIdx.x % cluster;
  if (thread == 0)
    for (int i = 0; i < LOADS; i++) {
      init(shared(&barriers[i]), 1);
      init(shared(&barriers[LOADS + i]), multicast ? cluster : 1);
    }
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (cluster > 1) cluster_sync();
  if (thread == 0) {
    long long start = clock64();
    for (int s = 0; s < steps; s++) {
      int slot = s % LOADS, phase = (s / LOADS) & 1;
      wait(shared(&barriers[LOADS + slot]), phase ^ 1);
      unsigned full = shared(&barriers[slot]);
      int row = (reader % 24) * 256, column = ((s + (reader / 24) * 5) % COLUMNS) * 64;
      expect(full, BOX);
      if (!multicast)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
            "[%1, {%3, %4}], [%2];" ::"r"(shared(base + slot * BOX)),
            "l"(&map), "r"(full), "r"(column), "r"(row)
            : "memory");
      else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(
                shared(base + slot * BOX + rank * (BOX / cluster))),
            "l"(&map), "r"(full), "r"(column), "r"(row + (int)rank * (256 / cluster)),
            "h"((unsigned short)((1 << cluster) - 1))
            : "memory");
    }
    cycles[blockIdx.x] = clock64() - start;
  } else if (thread == 32) {
    for (int s = 0; s < steps; s++) {
      int slot = s % LOADS, phase = (s / LOADS) & 1;
      wait(shared(&barriers[slot]), phase);
      unsigned empty = shared(&barriers[LOADS + slot]);
      if constexpr (multicast)
        for (int r = 0; r < cluster; r++) {
          unsigned there;
          asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(empty), "r"(r));
          asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there)
                       : "memory");
        }
      else
        arrive(empty);
    }
  }
  __syncthreads();
  if (cluster > 1) cluster_sync();
}

__global__ void draw(unsigned short* to, size_t count) {
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  for (; i < count; i += (size_t)gridDim.x * blockDim.x) {
    unsigned x = (unsigned)(i * 2654435761ull >> 7);
    x ^= x >> 15, x *= 0x2c1b3c6du, x ^= x >> 12, x *= 0x297a2d39u, x ^= x >> 15;
    to[i] = (unsigned short)((x & 0x8000) | ((120 + (x >> 16) % 8) << 7) | (x & 0x7f));
  }
}

static void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Milliseconds of so many launches, after one, and a block's median cycles in the last of them.
template <class Launch> static float time(int launches, Launch launch, long long* cycles,
                                          double* median) {
  cudaEvent_t start, end;
  check(cudaEventCreate(&start)), check(cudaEventCreate(&end));
  launch();
  check(cudaEventRecord(start));
  for (int i = 0; i < launches; i++) launch();
  check(cudaEventRecord(end));
  check(cudaGetLastError()), check(cudaDeviceSynchronize());
  std::vector<long long> all(SMS);
  check(cudaMemcpy(all.data(), cycles, SMS * 8, cudaMemcpyDeviceToHost));
  std::sort(all.begin(), all.end());
  *median = all[SMS / 2];
  float milliseconds;
  check(cudaEventElapsedTime(&milliseconds, start, end));
  return milliseconds;
}

template <int rows>
static void measure(char* few, size_t few_bytes, char* many, size_t many_bytes, float* out,
                    long long* cycles) {
  const char* names[] = {"nothing loaded", "all loaded from L2", "weights loaded from memory"};
  constexpr int stage = (WEIGHTS + rows) * 128, launches = 150;
  int bytes = stage * STAGES + 1024;
  check(cudaFuncSetAttribute(multiply<rows>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  double flops = 2.0 * WEIGHTS * rows * 64, ideal = flops / 4096, median;
  for (int load : {NOTHING, FROM_L2, FROM_MEMORY}) {
    int steps = (int)(2e6 / ideal);
    float ms = time(launches, [&] {
      multiply<rows><<<SMS, MATH + 128, bytes>>>(few, few_bytes, many, many_bytes, steps, load, out,
                                                 cycles);
    }, cycles, &median);
    double seconds = ms / 1e3 / launches, step = median / steps;
    std::printf("%3d rows, %-26s: %4.0f TFLOP/s, tensor cores busy %3.0f %% at %.2f GHz, %.1f TB/s "
                "to the SMs\n",
                rows, names[load], flops * steps * SMS / seconds / 1e12, 100 * ideal / step,
                flops * steps * SMS / seconds / (SMS * 4096 * ideal / step) / 1e9,
                load ? (double)stage * steps * SMS / seconds / 1e12 : 0.0);
  }
}

template <int cluster, bool multicast>
static void measure_loads(const char* name, CUtensorMap map, int share, long long* cycles) {
  auto kernel = load<cluster, multicast>;
  constexpr int steps = 2000, launches = 30;
  int bytes = BOX * LOADS + 1024;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = SMS, config.blockDim = 64, config.dynamicSmemBytes = bytes;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeClusterDimension;
  attribute[0].val.clusterDim = {cluster, 1, 1};
  config.attrs = attribute, config.numAttrs = 1;
  double median;
  float ms = time(launches, [&] {
    check(cudaLaunchKernelEx(&config, kernel, map, steps, share, cycles));
  }, cycles, &median);
  std::printf("%-44s: %4.1f TB/s, %.0f bytes a cycle and SM\n", name,
              (double)BOX * steps * SMS * launches / ms / 1e9, BOX * steps / median);
}

static CUtensorMap box(char* from, unsigned rows) {
  CUtensorMap map;
  void* encode;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                         cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) std::printf("no cuTensorMapEncodeTiled\n"), std::exit(1);
  cuuint64_t sizes[2] = {COLUMNS * 64, 6144}, strides[1] = {COLUMNS * 128};
  cuuint32_t shape[2] = {64, rows}, steps[2] = {1, 1};
  auto result = ((decltype(&cuTensorMapEncodeTiled))encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, from, sizes, strides, shape, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) std::printf("cuTensorMapEncodeTiled: %d\n", (int)result), std::exit(1);
  return map;
}

int main() {
  size_t few_bytes = 24ull << 20, many_bytes = 8ull << 30, more = 1 << 20;
  char *few, *many;
  float* out;
  long long* cycles;
  check(cudaMalloc(&few, few_bytes + more)), check(cudaMalloc(&many, many_bytes + more));
  check(cudaMalloc(&out, MATH * 4)), check(cudaMalloc(&cycles, SMS * 8));
  draw<<<1024, 256>>>((unsigned short*)few, (few_bytes + more) / 2);
  draw<<<1024, 256>>>((unsigned short*)many, (many_bytes + more) / 2);
  check(cudaGetLastError()), check(cudaDeviceSynchronize());
  measure<104>(few, few_bytes, many, many_bytes, out, cycles);
  measure<128>(few, few_bytes, many, many_bytes, out, cycles);
  measure<160>(few, few_bytes, many, many_bytes, out, cycles);
  measure_loads<1, false>("each SM reads for itself", box(few, 256), 1, cycles);
  measure_loads<2, false>("two SMs of a cluster read the same", box(few, 256), 2, cycles);
  measure_loads<2, true>("two SMs of a cluster read halves, multicast", box(few, 128), 2, cycles);
}
