"""Loads of half a line of memory that have L2 fetch all of it.

The four threads of a row of weights load 64 bytes of it side by side, and memory is faster where
the 128 bytes of a line are asked for at once.
"""

import tilelang.language as T

LINES = r"""
// Copy 16 bytes to shared memory, or zeros if they are not there.
static __device__ __forceinline__ void copy_of_line(void* to, const void* from, bool there) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile(
      "{\n.reg .pred there;\n setp.ne.b32 there, %2, 0;\n"
      " @there cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
      " @!there st.shared.v4.b32 [%0], {%3, %3, %3, %3};\n}" ::"r"(address),
      "l"(from), "r"(static_cast<int>(there)), "r"(0)
      : "memory");
}
// Read 16 bytes, or zeros if they are not there.
static __device__ __forceinline__ void read_of_line(unsigned* to, const void* from, bool there) {
  asm volatile(
      "{\n.reg .pred there;\n setp.ne.b32 there, %5, 0;\n"
      " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
      " @there ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(to[0]), "=&r"(to[1]), "=&r"(to[2]), "=&r"(to[3])
      : "l"(from), "r"(static_cast<int>(there)));
}
"""
"""The prelude of a kernel that calls what is below."""


def copy_of_line(to, source, there):
    """Return the asynchronous copy of 16 bytes.

    Args:
        to: Where they go in shared memory.
        source: The first element that is read.
        there: If not, nothing is read, and zeros are written.
    """
    return T.call_extern("void", "copy_of_line", to, T.address_of(source), there)


def read_of_line(to, source, there):
    """Return the load of 16 bytes.

    Args:
        to: The first of four 32-bit words that get them.
        source: The first element that is read.
        there: If not, nothing is read, and the words are zeros.
    """
    return T.call_extern("void", "read_of_line", T.address_of(to), T.address_of(source), there)
