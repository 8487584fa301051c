"""What the FP8 Hopper kernels say in CUDA besides `moves`: scales, and bytes of results."""

import tilelang.language as T

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
"""What a kernel that calls what is below has in its prelude, besides `moves.CUDA`."""


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
