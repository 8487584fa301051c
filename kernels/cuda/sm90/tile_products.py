"""Products of a tile of half-precision operands on Hopper's tensor cores."""

import tilelang.language as T

from tileops.kernels.cuda.grouped_gemm_tiles import GRAIN
from tileops.kernels.cuda.sm90.tile import HALF, LINE, WARP, WARPGROUP, WEIGHTS


def products(dtype: str, own: int, apart: int, block_m: int, stages: int, gathered: bool):
    """Make the macro that multiplies a tile as wide as it is into ``acc``.

    ``multiply(0, height, acc, w_desc, a_desc, full, empty, turn, steps)``: the descriptors of both
    rings, the barriers of the stages, the number of the tile's first stage among all, and the
    stages of the tile.

    Args:
        dtype: Type of the operands.
        own: From one warpgroup's rows of weights to those of the other.
        apart: From the one half of a warpgroup's rows of weights to the other.
        block_m: Most rows of a tile.
        stages: Loads in flight.
        gathered: Whether rows are loaded in pieces, rather than through TMA.
    """
    operand = {"bfloat16": "bf16", "float16": "fp16"}[dtype]

    @T.macro
    def multiply(wide: int, acc, w_desc, a_desc, full, empty, turn, steps):
        """Multiply a tile of ``wide`` rows, whose first stage is number ``turn`` of all.

        Of a tile of 0 rows the stages are only handed back.
        """
        first = T.get_thread_binding() // WARPGROUP * own
        slot = T.alloc_var(T.int32)
        before = T.alloc_var(T.int32)
        phase = T.alloc_var(T.int32)
        slot = T.truncmod(turn, stages)
        phase = T.truncdiv(turn, stages) & 1
        before = slot
        for k in T.unroll(steps, unroll_factor=1):
            T.barrier_wait(full[slot], phase)
            if wide > 0:
                if gathered:
                    T.fence_proxy_async()  # rows came through the other path to shared memory
                for half in (0, 1):
                    T.warpgroup_fence_operand(acc, half * block_m // 2, wide // 2)
                T.warpgroup_arrive()
            for ki in (0, 1, 2, 3) if wide > 0 else ():
                for half in (0, 1):
                    T.ptx_wgmma_ss(
                        T.float32,
                        f"m{HALF}n{wide}k16",
                        True,
                        True,
                        operand,
                        operand,
                        "fp32",
                        w_desc.data,
                        slot * (WEIGHTS * LINE) + (first + half * apart) * LINE + ki * 2,
                        a_desc.data,
                        slot * (block_m * LINE) + ki * 2,
                        acc.data,
                        half * block_m // 2,
                        T.Select(k > 0, 1, 0) if ki == 0 else 1,
                        1,
                        1,
                    )
            if wide > 0:
                T.warpgroup_commit_batch()
                for half in (0, 1):
                    T.warpgroup_fence_operand(acc, half * block_m // 2, wide // 2)
                # one multiplication stays in flight: the stage before it is free
                T.wait_wgmma(1)
            if k > 0 and T.shuffle_elect(WARP):
                T.barrier_arrive(empty[before])
            before = slot
            phase = phase ^ T.Select(slot == stages - 1, 1, 0)
            slot = T.Select(slot == stages - 1, 0, slot + 1)
        if wide > 0:
            T.wait_wgmma(0)
            for half in (0, 1):
                T.warpgroup_fence_operand(acc, half * block_m // 2, wide // 2)
        if T.shuffle_elect(WARP):
            T.barrier_arrive(empty[before])

    @T.macro
    def dispatch(wide: int, height, *args):
        """Multiply a tile as wide as it is."""
        if wide < block_m:
            if height <= wide:
                multiply(wide, *args)
            else:
                dispatch(wide + GRAIN, height, *args)
        else:
            multiply(wide, *args)

    return dispatch
