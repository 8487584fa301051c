"""What the Hopper kernels say in CUDA: moves of 16 bytes by addresses, and what blocks count."""

import tilelang.language as T

CUDA = """
// Load 16 bytes of each row that is not negative: of rows of 128 bytes in shared memory, every 24th
// from `to` on, and every 24th from `to_others` on. Addresses are made in assembly, or else the
// compiler would keep those of all rows and spill, and some at a time, as a load needs its address
// for longer than it takes to make one.
template <int rows>
static __device__ __forceinline__ void load_rows(const void* to, const void* to_others,
                                                 const void* from, const int* vectors,
                                                 bool within) {
  unsigned address[2] = {static_cast<unsigned>(__cvta_generic_to_shared(to)),
                         static_cast<unsigned>(__cvta_generic_to_shared(to_others))};
  constexpr int together = 4;
#pragma unroll
  for (int i = 0; i < rows; i += together) {
    unsigned long long place[together];
#pragma unroll
    for (int j = 0; j < together; ++j)
      if (i + j < rows)
        asm volatile("mad.wide.s32 %0, %1, 16, %2;"
                     : "=l"(place[j])
                     : "r"(vectors[i + j]), "l"(from));
#pragma unroll
    for (int j = 0; j < together; ++j)
      if (i + j < rows)
        asm volatile(
            "{\\n .reg .pred there;\\n setp.ge.s32 there, %2, 0;\\n"
            " @there cp.async.cg.shared.global [%0], [%1], 16, %3;\\n}" ::"r"(
                address[(i + j) % 2] + (i + j) / 2 * 3072),
            "l"(place[j]), "r"(vectors[i + j]), "r"(within ? 16 : 0));
  }
}
// Store 16 bytes of `count` rows, `lines` apart, of which those below `rows` are there. All are
// read first, and the addresses follow from one another.
template <int count, int apart, int lines>
static __device__ __forceinline__ void store_rows(void* to, const void* from, long long step,
                                                  int rows) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(from)), value[count][4];
#pragma unroll
  for (int i = 0; i < count; ++i)
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value[i][0]), "=r"(value[i][1]), "=r"(value[i][2]), "=r"(value[i][3])
                 : "r"(address + i * apart)
                 : "memory");
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if (i * lines < rows)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value[i][0]),
                   "r"(value[i][1]), "r"(value[i][2]), "r"(value[i][3])
                   : "memory");
    asm("add.s64 %0, %0, %1;" : "+l"(to) : "l"(step));
  }
}
static __device__ __forceinline__ void count_up(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
// One more is counted; how many were is returned.
static __device__ __forceinline__ int take(int* counter) {
  int value;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(value) : "l"(counter));
  return value;
}
static __device__ __forceinline__ void lower(int* number, int to) {
  asm volatile("red.relaxed.gpu.global.min.s32 [%0], %1;" ::"l"(number), "r"(to) : "memory");
}
static __device__ __forceinline__ int read_again(const int* number) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(number) : "memory");
  return value;
}
static __device__ __forceinline__ void put(void* to, int a, int b, int c, int d, int e) {
  int* place = static_cast<int*>(to);
  place[0] = a, place[1] = b, place[2] = c, place[3] = d, place[4] = e;
}
static __device__ __forceinline__ void wait_for(const int* counter, int least) {
  int value;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  } while (value < least);
  asm volatile("fence.proxy.async;" ::: "memory");  // for what TMA loads then
}
"""
"""The prelude of a kernel that calls what is below."""

FP8 = """
static __device__ __forceinline__ void load_number(void* to, const void* from) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from));
}
// Not to be moved: a wait for it would hold back the tensor cores' next instruction.
static __device__ __forceinline__ float read_number(const void* from) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(from));
  float number;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(number) : "r"(address) : "memory");
  return number;
}
static __device__ __forceinline__ unsigned short two_bytes(float low, float high) {
  unsigned short both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}
static __device__ __forceinline__ void pair_of_bytes(void* to, float low, float high) {
  *static_cast<unsigned short*>(to) = two_bytes(low, high);
}
// Add the sums of a block, scaled, to all sums. The scales of 4 rows are read at once, two steps
// ahead: the first 8 are there already.
template <int rows>
static __device__ __forceinline__ void add_scaled(float* sums, const float* block,
                                                  const void* of_rows, const float* first,
                                                  float of_weights) {
  const float4* at = static_cast<const float4*>(of_rows);
  float4 ready[3];
  ready[0] = make_float4(first[0], first[1], first[2], first[3]);
  ready[1] = make_float4(first[4], first[5], first[6], first[7]);
#pragma unroll
  for (int j = 0; j < (rows + 15) / 16; ++j) {
    if ((j + 2) * 16 < rows) ready[(j + 2) % 3] = at[(j + 2) * 4];
    float4 by = ready[j % 3];
    float scale[4] = {by.x * of_weights, by.y * of_weights, by.z * of_weights, by.w * of_weights};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (j * 16 + i / 4 * 8 < rows)
        sums[j * 8 + i] = fmaf(scale[i / 4 * 2 + i % 2], block[j * 8 + i], sums[j * 8 + i]);
  }
}
// Of what two lanes hold, each keeps the half that the other gives away.
template <int half, int apart>
static __device__ __forceinline__ int keep_largest(float* most) {
  bool upper = threadIdx.x & apart;
#pragma unroll
  for (int i = 0; i < half; ++i) {
    float given = upper ? most[i] : most[i + half], kept = upper ? most[i + half] : most[i];
    most[i] = fmaxf(kept, __shfl_xor_sync(0xffffffff, given, apart));
  }
  return upper ? half : 0;
}
// Write the largest finite magnitude of each row of a tile among a warp's 16 rows of weights.
template <int rows>
static __device__ __forceinline__ void largest_of_rows(void* to, const float* sums) {
  constexpr int count = rows / 4;
  float most[count];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const float* at = sums + i / 2 * 4 + i % 2;
    float one = fabsf(at[0]), two = fabsf(at[2]);
    most[i] = fmaxf(one <= 3.402823466e38f ? one : 0.0f, two <= 3.402823466e38f ? two : 0.0f);
  }
  int first = keep_largest<count / 2, 16>(most);
  first += keep_largest<count / 4, 8>(most);
  first += keep_largest<count / 8, 4>(most);
#pragma unroll
  for (int i = 0; i < count / 8; ++i) {
    int at = first + i;
    at = at / 4 * 16 + at / 2 % 2 * 8 + threadIdx.x % 4 * 2 + at % 2;
    static_cast<float*>(to)[at] = most[i];
  }
}
// Scale and round 8 results, two rows of weights by 4 rows of a tile, and store them turned: a lane
// gives one of two neighbouring rows of the tile to the lane of the next row of weights.
template <int width>
static __device__ __forceinline__ void turned_bytes(void* to, const float* scale,
                                                    const float* value) {
  bool odd = threadIdx.x & 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float2 by = *reinterpret_cast<const float2*>(scale + 8 * j);
    unsigned short part[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      part[i] = two_bytes(value[4 * j + 2 * i] * by.x, value[4 * j + 2 * i + 1] * by.y);
    unsigned mine = part[0] | static_cast<unsigned>(part[1]) << 16;
    unsigned other = __shfl_xor_sync(0xffffffff, mine, 4);
    unsigned turned = __byte_perm(mine, other, odd ? 0x3715 : 0x6240);
    unsigned short* at = reinterpret_cast<unsigned short*>(static_cast<char*>(to) + j * 8 * width);
    at[0] = static_cast<unsigned short>(turned);
    at[4] = static_cast<unsigned short>(turned >> 16);
  }
}
"""
"""What the FP8 kernels call besides."""


def load_rows(to, to_others, source, offsets, count: int, within):
    """Return the load of 16 bytes of each of ``count`` rows into rows of 128 bytes.

    Args:
        to: Where the first row goes in shared memory; every other row goes 24 rows below the last.
        to_others: Where the second row goes, likewise.
        source: The element of row 0 that those bytes start at.
        offsets: From row 0 to each row, in vectors of 16 bytes; negative for a row to leave out.
        count: Rows.
        within: If not, zeros are written.
    """
    args = to, to_others, T.address_of(source), T.address_of(offsets[0]), within
    return T.call_extern("void", f"load_rows<{count}>", *args)


def store_rows(to, staged, shape: tuple[int, int, int], step, rows):
    """Return the store of 16 bytes of several rows.

    Args:
        to: The first element of the first row that is written.
        staged: Where in shared memory it is.
        shape: How many rows, the bytes from one to the next in shared memory, and the rows of the
            result from one to the next.
        step: The bytes from one to the next in the result.
        rows: Rows of the result from the first one on: what lies past them is not written.
    """
    count, apart, lines = shape
    name = f"store_rows<{count}, {apart}, {lines}>"
    return T.call_extern("void", name, T.address_of(to), staged, step, rows)


def store_turned(to, words):
    """Return a warp's store of four 8 by 8 blocks, turned, to shared memory: ``stmatrix``."""
    name = "tl::ptx_stmatrix_m8n8_x4_trans"
    return T.call_extern("handle", name, to, words[0], words[1], words[2], words[3])


def count_up(counter):
    """Return an addition of 1 that releases what this thread has seen written."""
    return T.call_extern("void", "count_up", T.address_of(counter))


def take(counter):
    """Return a counter, which is 1 more then."""
    return T.call_extern("int32", "take", T.address_of(counter))


def lower(number, to):
    """Return the store of the lesser of two numbers in the place of the first."""
    return T.call_extern("void", "lower", T.address_of(number), to)


def read_again(number):
    """Return a number that others have changed."""
    return T.call_extern("int32", "read_again", T.address_of(number))


def put(to, *numbers):
    """Return the store of five numbers to shared memory.

    Where TileLang sees such a store, it puts a fence before each load through TMA.

    Args:
        to: Where the first goes.
        numbers: The numbers.
    """
    return T.call_extern("void", "put", to, *numbers)


def wait_for(counter, least):
    """Return a wait until a counter is ``least``; what was released before is seen then."""
    return T.call_extern("void", "wait_for", T.address_of(counter), least)


def load_number(to, source):
    """Return the load of 4 bytes into shared memory."""
    return T.call_extern("void", "load_number", to, T.address_of(source))


def largest_of_rows(to, sums, rows: int):
    """Return the store of the largest finite magnitude of each of ``rows`` rows of a tile.

    Args:
        to: Where in shared memory, a float32 for each row.
        sums: A thread's results of a half, in the order of a tensor core's result.
        rows: Rows of a tile.
    """
    return T.call_extern("void", f"largest_of_rows<{rows}>", to, T.address_of(sums[0]))


def turned_bytes(to, scale, first, width: int):
    """Return the store of 8 results of a thread as E4M3 bytes, in rows of shared memory.

    Args:
        to: Where the first byte of this thread goes.
        scale: What results are multiplied by: of the first of its rows, in shared memory.
        first: The first of the results.
        width: Bytes from one row to the next.
    """
    return T.call_extern("void", f"turned_bytes<{width}>", to, scale, T.address_of(first))


def add_scaled(sums, block, of_rows, first, of_weights, rows: int):
    """Return the addition of the sums of a block, times the scales of weights and rows.

    Args:
        sums: The first of a thread's sums of a half.
        block: The first of its sums of the block.
        of_rows: The scales of the thread's first 4 rows in shared memory.
        first: Those of its first 8 rows, read already.
        of_weights: The scale of the weights.
        rows: Rows of the tile.
    """
    name, sums = f"add_scaled<{rows}>", T.address_of(sums)
    args = T.address_of(block), of_rows, T.address_of(first[0]), of_weights
    return T.call_extern("void", name, sums, *args)


def read_number(source):
    """Return a float32 read from shared memory, where it stands among the instructions."""
    return T.call_extern("float32", "read_number", source)


def pair_of_bytes(to, low, high):
    """Return the store of two numbers as E4M3 bytes; what is too large becomes 448."""
    return T.call_extern("void", "pair_of_bytes", to, low, high)
