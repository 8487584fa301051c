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
