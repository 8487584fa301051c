"""Permute-align on the CPU: a counting sort whose segments are whole blocks, on one core."""

import tilelang.cpu.language as T

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.floats import view
from tileops.kernels.cpu.permute import count_routes
from tileops.moe.permute_align import align_shapes


@compiler.jit
def build(level: str):
    """Build the kernel, for E experts and K routes of a token.

    Args:
        level: Name of the vector level.
    """

    @T.prim_func
    def kernel(
        ids_address: T.Tensor[(1,), T.uint8],
        slots_address: T.Tensor[(1,), T.uint8],
        experts_address: T.Tensor[(1,), T.uint8],
        end_address: T.Tensor[(1,), T.uint8],
        cursor_address: T.Tensor[(1,), T.uint8],
        tokens: T.int64,
        K: T.int64,
        E: T.int64,
        ids_row: T.int64,
        num_slots: T.int64,
        num_blocks: T.int64,
        block_size: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags(level))
        ids = view(ids_address, (tokens, K), T.int32, (ids_row, 1))
        slots = view(slots_address, (num_slots,), T.int32)
        experts = view(experts_address, (num_blocks,), T.int32)
        end = view(end_address, (1,), T.int32)
        cursor = view(cursor_address, (E,), T.int32)
        with T.Kernel(1) as _:
            block = T.alloc_var(T.int64, init=0)
            for s in T.serial(num_slots):
                slots[s] = T.cast(tokens * K, "int32")
            count_routes(ids, tokens, K, E, cursor)
            for e in T.serial(E):
                blocks: T.int64 = (cursor[e] + block_size - 1) // block_size
                cursor[e] = T.cast(block * block_size, "int32")
                for _b in T.serial(blocks):
                    experts[block] = T.cast(e, "int32")
                    block += 1
            end[0] = T.cast(block * block_size, "int32")
            for b in T.serial(block, num_blocks):
                experts[b] = T.cast(E, "int32")
            for t in T.serial(tokens):
                for k in T.serial(K):
                    if ids[t, k] >= 0 and ids[t, k] < E:
                        slot: T.int32 = cursor[ids[t, k]]
                        slots[slot] = T.cast(t * K + k, "int32")
                        cursor[ids[t, k]] = slot + 1

    return kernel


def refuse(topk_ids, num_experts, block_size, *, target) -> str | None:
    """Say why this kernel cannot serve a call: no compiler, or more slots than an int32 counts."""
    num_slots, _ = align_shapes(topk_ids.numel(), num_experts, block_size)
    if num_slots >= 2**31:
        return f"takes fewer than 2**31 slots, got {num_slots}"
    return compiler.refusal()


def moe_permute_align_fwd(topk_ids, num_experts, block_size, *, target):
    """Sort the routes; return the route of each slot, the expert of each block and their count."""
    tokens, K = topk_ids.shape
    sizes = align_shapes(tokens * K, num_experts, block_size)
    slots, experts, end = results = [topk_ids.new_empty(n) for n in (*sizes, 1)]
    cursor = topk_ids.new_empty(num_experts)
    kernel = build(compiler.level().name)
    kernel(
        *(x.data_ptr() for x in (topk_ids, *results, cursor)),
        *(tokens, K, num_experts, topk_ids.stride(0), *sizes, block_size),
    )
    return slots, experts, end
