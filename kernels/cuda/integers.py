"""Packed integers in kernels, said in CUDA: how they are loaded, and made operands of an MMA.

In an operand of the tensor cores a thread of a row's four holds 2 of 8 neighbouring columns: codes
``2 * quad`` and ``2 * quad + 1``. A code becomes a number by standing in the low bits of the
mantissa of a power of two, from which that power plus the zero point is then subtracted. All of it
is exact: codes have 8 bits at most, as the significand of a bfloat16.
"""

import tilelang.language as T

CUDA = r"""
// Copy 16 bytes to shared memory, of which those past the first `there` are zeros.
static __device__ __forceinline__ void copy_vector(const void* to, const void* from,
                                                   long long there) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  int bytes = there <= 0 ? 0 : there >= 16 ? 16 : static_cast<int>(there);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(address), "l"(from), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void load_words(unsigned* words, const void* from) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(from));
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address) : "memory");
}
// Load four matrices of 8 rows by 16 bytes: lane l has the address of row l % 8 of number l / 8.
static __device__ __forceinline__ void load_matrices(unsigned* words, const void* from) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(from));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address) : "memory");
}
static __device__ __forceinline__ unsigned subtract_bfloat16(unsigned a, unsigned b) {
  asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
static __device__ __forceinline__ unsigned subtract_float16(unsigned a, unsigned b) {
  asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
// What is subtracted from a pair of codes: the power of two and the zero point.
static __device__ __forceinline__ unsigned offset_4_bfloat16(unsigned point) {
  return (0x4300 | point) * 0x10001;  // 128
}
static __device__ __forceinline__ unsigned offset_4_float16(unsigned point) {
  return (0x6400 | point) * 0x10001;  // 1024
}
static __device__ __forceinline__ unsigned offset_8_float16(unsigned point) {
  return (0x6400 | point) * 0x10001;
}
static __device__ __forceinline__ unsigned offset_8_bfloat16(unsigned point) {
  return 0x4B000000 | point;  // 2**23, a float32
}
// Codes 2 * quad and 2 * quad + 1 of the 8 in a word: the two in byte `quad`.
static __device__ __forceinline__ unsigned spread_4(unsigned word, int quad, unsigned power) {
  return ((__byte_perm(word, 0, 0x4440 | quad) * 0x1001) & 0x000F000F) | power;
}
static __device__ __forceinline__ unsigned codes_4_bfloat16(unsigned word, int quad,
                                                            unsigned offset) {
  return subtract_bfloat16(spread_4(word, quad, 0x43004300), offset);
}
static __device__ __forceinline__ unsigned codes_4_float16(unsigned word, int quad,
                                                           unsigned offset) {
  return subtract_float16(spread_4(word, quad, 0x64006400), offset);
}
// The same of 8 in two words, given the word that has them: the low half, or for an odd quad the
// high one.
static __device__ __forceinline__ unsigned codes_8_float16(unsigned word, int quad,
                                                           unsigned offset) {
  unsigned pair = __byte_perm(word, 0x64, 0x4140 + (quad & 1) * 0x0202);
  return subtract_float16(pair, offset);
}
static __device__ __forceinline__ unsigned codes_8_bfloat16(unsigned word, int quad,
                                                            unsigned offset) {
  unsigned at = 0x7440 | (quad & 1) * 2, pair;
  float low = __uint_as_float(__byte_perm(word, 0x4B000000, at)) - __uint_as_float(offset);
  float high = __uint_as_float(__byte_perm(word, 0x4B000000, at + 1)) - __uint_as_float(offset);
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
"""
"""The prelude of a kernel that calls what is below."""


def copy(to, source, there):
    """Return the start of a copy of 16 bytes to shared memory.

    Args:
        to: Where in shared memory.
        source: The element that they start at.
        there: How many bytes there are: zeros stand for those past the end.
    """
    return T.call_extern("void", "copy_vector", to, T.address_of(source), T.Cast(T.int64, there))


def load_words(words, source):
    """Return a thread's load of four words from shared memory."""
    return T.call_extern("void", "load_words", T.address_of(words[0]), source)


def load_matrices(words, source):
    """Return a warp's load of four blocks of 8 rows by 16 bytes: ``ldmatrix``."""
    return T.call_extern("void", "load_matrices", T.address_of(words[0]), source)


def offset_of(byte, shift, bits: int, dtype: str):
    """Return what `codes_of` subtracts for the zero point that starts at a bit of a byte."""
    point = (T.Cast(T.uint32, byte) >> T.Cast(T.uint32, shift)) & T.uint32((1 << bits) - 1)
    return T.call_extern("uint32", f"offset_{bits}_{dtype}", point)


def codes_of(word, quad, offset, bits: int, dtype: str):
    """Return two codes of a word minus the zero point, as a pair of ``dtype``."""
    return T.call_extern("uint32", f"codes_{bits}_{dtype}", word, quad, offset)
