"""Products of a tile on Hopper's tensor cores: FP8 blocks, scaled and added up in float32.

The sums of a block of 128 columns are taken by themselves, since the tensor cores keep fewer bits
of FP8 sums than float32 has. A warpgroup scales and adds them while the other one multiplies.
"""

import tilelang.language as T

from tileops.kernels.cuda.grouped_gemm_tiles import GRAIN
from tileops.kernels.cuda.sm90.fp8_form import (
    HIGH,
    LOW,
    Form,
)
from tileops.kernels.cuda.sm90.fp8_moves import add_scaled, read_number
from tileops.kernels.cuda.sm90.tile import (
    HALF,
    LINE,
    MATH_GROUPS,
    STEP,
    WARP,
    WARPGROUP,
    WEIGHTS,
)


def products(form: Form):
    """Make the macro that multiplies a tile into ``acc``, whose sums lie as the results read them.

    ``multiply(acc, height, w_desc, a_desc, scale, full, empty, turn, steps)``: ``height`` rows, the
    descriptors of both rings, the scales of the stages, their barriers, the number of the tile's
    first stage among all, and the blocks of columns.
    """

    @T.macro
    def instruct(shape: str, block, at: int, tall_desc, tall, wide_desc, wide):
        """Start the product of a block of 128 columns into ``block``, from ``at`` on."""
        T.warpgroup_arrive()
        for ki in (0, 1, 2, 3):
            T.ptx_wgmma_ss(
                *(T.float32, shape, True, True, "e4m3", "e4m3", "fp32"),
                *(tall_desc.data, tall + ki * 2, wide_desc.data, wide + ki * 2),
                *(block.data, at, 1 if ki > 0 else 0, 1, 1),
            )
        T.warpgroup_commit_batch()

    @T.macro
    def multiply_high(acc, w_desc, a_desc, scale, full, empty, turn, steps):
        """Multiply a tile of up to 128 rows, whose first stage is number ``turn`` of all.

        The rows are the tall operand here, in two halves, and a warpgroup's 128 rows of weights
        the wide one: then a thread needs the scales of two rows a half, and no more.
        """
        group = T.get_thread_binding() // WARPGROUP
        lane = T.get_thread_binding() % WARP
        warp = T.get_thread_binding() % WARPGROUP // WARP
        slot = T.alloc_var(T.int32)
        phase = T.alloc_var(T.int32)
        block = T.alloc_local((HALF,), T.float32)
        of_rows = T.alloc_local((2,), T.float32)
        of_weights = T.alloc_local((2,), T.float32)
        by = T.alloc_local((4,), T.float32)
        slot = T.truncmod(turn, form.stages)
        phase = T.truncdiv(turn, form.stages) & 1
        for i in T.unroll(HIGH):
            acc[i] = 0
        for _ in T.unroll(steps, unroll_factor=1):
            T.barrier_wait(full[slot], phase)
            if form.gathers:
                T.fence_proxy_async()  # rows came through the other path to shared memory
            for half in (0, 1):
                T.warpgroup_fence_operand(block, 0, HALF)
                instruct(
                    f"m{HALF}n{2 * HALF}k32",
                    block,
                    0,
                    a_desc,
                    slot * (form.block_m * LINE) + half * HALF * LINE,
                    w_desc,
                    slot * (WEIGHTS * LINE) + group * (2 * HALF * LINE),
                )
                T.warpgroup_fence_operand(block, 0, HALF)
                at = half * HALF + warp * STEP + lane // 8 * 4 + lane // 4 % 2
                for i in T.unroll(2):
                    of_rows[i] = read_number(T.access_ptr(scale[slot, at + i * 2], "r", 1))
                for i in T.unroll(form.parts):
                    of_weights[i] = read_number(
                        T.access_ptr(scale[slot, form.block_m + i * MATH_GROUPS + group], "r", 1)
                    )
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(block, 0, HALF)
                for i in T.unroll(2 * form.parts):
                    by[i] = of_rows[i % 2] * of_weights[i // 2]
                for i in T.unroll(HALF):
                    factor = by[i // 2 % 2 + (i // (HALF // 2) * 2 if form.parts == 2 else 0)]
                    acc[half * HALF + i] = acc[half * HALF + i] + factor * block[i]
            if T.shuffle_elect(WARP):
                T.barrier_arrive(empty[slot])
            phase = phase ^ T.Select(slot == form.stages - 1, 1, 0)
            slot = T.Select(slot == form.stages - 1, 0, slot + 1)

    @T.macro
    def multiply_low(wide: int, acc, w_desc, a_desc, scale, full, empty, turn, steps):
        """Multiply a tile of ``wide`` rows, the wide operand as in `multiply_tiles`.

        Of a tile of 0 rows the form.stages are only handed back.
        """
        group = T.get_thread_binding() // WARPGROUP
        lane = T.get_thread_binding() % WARP
        slot = T.alloc_var(T.int32)
        phase = T.alloc_var(T.int32)
        block = T.alloc_local((max(wide, 1),), T.float32)  # of both halves
        of_weights = T.alloc_local((2,), T.float32)
        of_rows = T.alloc_local((8,), T.float32)
        slot = T.truncmod(turn, form.stages)
        phase = T.truncdiv(turn, form.stages) & 1
        for i in T.unroll(wide // 2):
            acc[i] = 0
            acc[LOW // 2 + i] = 0
        for _ in T.unroll(steps, unroll_factor=1):
            T.barrier_wait(full[slot], phase)
            if wide > 0:
                if form.gathers:
                    T.fence_proxy_async()
                T.warpgroup_fence_operand(block, 0, wide)
            for half in (0, 1) if wide > 0 else ():
                instruct(
                    f"m{HALF}n{wide}k32",
                    block,
                    half * (wide // 2),
                    w_desc,
                    slot * (WEIGHTS * LINE) + (group * 2 + half) * HALF * LINE,
                    a_desc,
                    slot * (form.block_m * LINE),
                )
            if wide > 0:
                T.warpgroup_fence_operand(block, 0, wide)
                for half in T.unroll(2):
                    part = half if form.parts == 2 else 0
                    of_weights[half] = read_number(
                        T.access_ptr(scale[slot, form.block_m + part * MATH_GROUPS + group], "r", 1)
                    )
                for step in (0, 1):
                    for i in T.vectorized(4):
                        of_rows[step * 4 + i] = scale[slot, step * STEP + lane % 4 * 4 + i]
            for half in (0, 1) if wide > 0 else ():
                T.wait_wgmma(1 - half)
                T.warpgroup_fence_operand(block, half * (wide // 2), wide // 2)
                add_scaled(
                    acc[half * (LOW // 2)],
                    block[half * (wide // 2)],
                    T.access_ptr(scale[slot, lane % 4 * 4], "r", 4),
                    of_rows,
                    of_weights[half],
                    wide,
                )
            if T.shuffle_elect(WARP):
                T.barrier_arrive(empty[slot])
            phase = phase ^ T.Select(slot == form.stages - 1, 1, 0)
            slot = T.Select(slot == form.stages - 1, 0, slot + 1)

    @T.macro
    def dispatch(wide: int, height, *args):
        """Multiply a low tile as wide as it is."""
        if wide < LOW:
            if height <= wide:
                multiply_low(wide, *args)
            else:
                dispatch(wide + GRAIN, height, *args)
        else:
            multiply_low(wide, *args)

    @T.macro
    def multiply(acc, height, *rings):
        """Multiply a tile."""
        if form.high and height > LOW:
            multiply_high(acc, *rings)
        else:
            dispatch(0, height, acc, *rings)

    return multiply
