"""Messages between the thread blocks of a cluster: 16 bytes at a time, counted by a barrier."""

MAIL = r"""
__device__ __forceinline__ unsigned address_of(const void* place) {
  return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

__device__ __forceinline__ void open_mail(const void* barrier, int bytes) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;\n"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
      :: "r"(address_of(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void send_mail(
    const int* place, const void* barrier, int block, int a, int b, int c, int d) {
  asm volatile(
      "{\n.reg .b32 place, barrier;\n"
      "mapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
      " [place], {%3, %4, %5, %6}, [barrier];\n}\n"
      :: "r"(address_of(place)), "r"(address_of(barrier)), "r"(block), "r"(a), "r"(b), "r"(c),
      "r"(d) : "memory");
}

__device__ __forceinline__ void await_mail(const void* barrier) {
  asm volatile(
      "{\n.reg .pred arrived;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 arrived, [%0], 0;\n"
      "@!arrived bra again;\n}\n"
      :: "r"(address_of(barrier)) : "memory");
}
"""
"""Write 16 bytes of shared memory of each block of the cluster, at the same place as in this one.

The barrier, used once, counts the bytes that arrive: a barrier of the whole cluster would first
wait until all writes of the block, those to global memory too, had come through.
"""
