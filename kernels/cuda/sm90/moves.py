"""What the Hopper kernels say in CUDA: moves of 16 bytes by addresses, and counters of blocks."""

import tilelang.language as T

CUDA = """
// Load 16 bytes of each row that is not negative, to every 16th row of shared memory. The address
// is made in assembly, or else the compiler would keep those of all rows and spill.
template <int rows>
static __device__ __forceinline__ void load_rows(const void* to, const void* from,
                                                 const int* vectors, bool within) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
#pragma unroll
  for (int i = 0; i < rows; ++i)
    if (vectors[i] >= 0)
      asm volatile(
          "{\\n .reg .b64 place;\\n mad.wide.s32 place, %1, 16, %2;\\n"
          " cp.async.cg.shared.global [%0], [place], 16, %3;\\n}" ::"r"(address + i * 2048),
          "r"(vectors[i]), "l"(from), "r"(within ? 16 : 0));
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
static __device__ __forceinline__ void wait_for(const int* counter, int least) {
  int value;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  } while (value < least);
}
"""
"""The prelude of a kernel that calls what is below."""


def load_rows(to, source, offsets, count: int, within):
    """Return the load of 16 bytes of each of ``count`` rows into every 16th row of 128 bytes.

    Args:
        to: Where in shared memory.
        source: The element of row 0 that those bytes start at.
        offsets: From row 0 to each row, in vectors of 16 bytes; negative for a row to leave out.
        count: Rows.
        within: If not, zeros are written.
    """
    to_row_0 = T.address_of(source)
    return T.call_extern(
        "void", f"load_rows<{count}>", to, to_row_0, T.address_of(offsets[0]), within
    )


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


def wait_for(counter, least):
    """Return a wait until a counter is ``least``; what was released before is seen then."""
    return T.call_extern("void", "wait_for", T.address_of(counter), least)
