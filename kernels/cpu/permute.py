"""Pre- and post-permute on the CPU: a counting sort of the routes, and rows copied or added up.

The sort runs on one core, in the order of the tokens, which makes it stable. Rows are then copied,
or tokens combined, on all of them.
"""

import math

import tilelang.cpu.language as T

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.floats import (
    FLOAT32,
    FORMATS,
    any_floats,
    floats,
    narrow,
    view,
    widen,
)
from tileops.kernels.cpu.threads import parallel
from tileops.layouts import MaskedLayoutSpec

_PSUM, _PER_ROW, _MASKED = 0, 1, 2
_THREAD_BYTES = 1 << 18  # least memory traffic that pays for a thread
_STRIP = 512  # columns that a token's sum keeps at a time


@T.macro
def count_routes(ids, tokens, K, E, counts):
    """Leave in ``counts`` how many routes each expert has; ids outside [0, E) are none's."""
    for e in T.serial(E):
        counts[e] = 0
    for t in T.serial(tokens):
        for k in T.serial(K):
            if ids[t, k] >= 0 and ids[t, k] < E:
                counts[ids[t, k]] += 1


@compiler.jit
def build_pre(level: str):
    """Build the kernel that sorts routes and copies rows, whatever their dtype.

    Letters: E experts, K routes of a token, R rows of the layout, ``slab`` of them an expert if it
    is masked and 0 otherwise; ``width`` and ``hidden_row`` are bytes.

    Args:
        level: Name of the vector level.
    """

    @T.macro
    def sort(ids, metadata, inverse, cursor, source, tokens, K, E, R, layout, align, slab):
        """Count, give each expert its first row, then place the routes in the order of tokens."""
        start = T.alloc_var(T.int64, init=0)
        for r in T.serial(R):
            source[r] = -1
        count_routes(ids, tokens, K, E, cursor)
        for e in T.serial(E):
            if layout == _MASKED:
                metadata[e] = T.min(cursor[e], T.cast(slab, "int32"))
                cursor[e] = 0
            else:
                end: T.int64 = start + (cursor[e] + align - 1) // align * align
                cursor[e] = T.cast(start, "int32")
                if layout == _PSUM:
                    metadata[e] = T.cast(end, "int32")
                else:
                    for r in T.serial(start, end):
                        metadata[r] = T.cast(e, "int32")
                start = end
        if layout == _PER_ROW:
            for r in T.serial(start, R):
                metadata[r] = T.cast(E, "int32")
        for t in T.serial(tokens):
            for k in T.serial(K):
                inverse[t, k] = -1
                if ids[t, k] >= 0 and ids[t, k] < E:
                    slot: T.int32 = cursor[ids[t, k]]
                    if layout != _MASKED or slot < slab:
                        cursor[ids[t, k]] = slot + 1
                        place: T.int64 = ids[t, k] * slab + slot
                        inverse[t, k] = T.cast(place, "int32")
                        source[place] = T.cast(t, "int32")

    @T.prim_func
    def kernel(
        hidden_address: T.Tensor[(1,), T.uint8],
        ids_address: T.Tensor[(1,), T.uint8],
        input_address: T.Tensor[(1,), T.uint8],
        metadata_address: T.Tensor[(1,), T.uint8],
        inverse_address: T.Tensor[(1,), T.uint8],
        cursor_address: T.Tensor[(1,), T.uint8],
        source_address: T.Tensor[(1,), T.uint8],
        tokens: T.int64,
        K: T.int64,
        E: T.int64,
        R: T.int64,
        width: T.int64,
        hidden_row: T.int64,
        ids_row: T.int64,
        layout: T.int32,
        align: T.int64,
        slab: T.int64,
        sorts: T.int32,
        lo: T.int64,
        hi: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags(level))
        hidden = view(hidden_address, (tokens, width), T.uint8, (hidden_row, 1))
        expert_input = view(input_address, (R, width), T.uint8)
        ids = view(ids_address, (tokens, K), T.int32, (ids_row, 1))
        metadata = view(metadata_address, (T.max(E, R),), T.int32)
        inverse = view(inverse_address, (tokens, K), T.int32)
        cursor = view(cursor_address, (E,), T.int32)
        source = view(source_address, (R,), T.int32)
        with T.Kernel(1) as _:
            if sorts != 0:
                sort(
                    *(ids, metadata, inverse, cursor, source, tokens, K, E, R),
                    *(layout, align, slab),
                )
            for r in T.serial(lo, hi):
                token: T.int64 = source[r]
                if token >= 0:
                    for i in T.serial(width):
                        expert_input[r, i] = hidden[token, i]
                else:
                    for i in T.serial(width):
                        expert_input[r, i] = T.uint8(0)

    return kernel


@compiler.jit
def build_post(level: str):
    """Build the kernel that combines rows, of all dtypes.

    Letters: H columns, K routes of a token, R rows of ``expert_output``.

    Args:
        level: Name of the vector level.
    """

    @T.prim_func
    def kernel(
        rows_address: T.Tensor[(1,), T.uint8],
        weights_address: T.Tensor[(1,), T.uint8],
        inverse_address: T.Tensor[(1,), T.uint8],
        out_address: T.Tensor[(1,), T.uint8],
        tokens: T.int64,
        H: T.int64,
        K: T.int64,
        R: T.int64,
        slab: T.int64,
        slab_stride: T.int64,
        row_stride: T.int64,
        weights_row: T.int64,
        out_row: T.int64,
        fmt: T.int32,
        out_fmt: T.int32,
        scale: T.float32,
        lo: T.int64,
        hi: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags(level))
        shape, steps = (R // slab, slab, H), (slab_stride, row_stride, 1)
        rows = any_floats(rows_address, shape, steps)
        out = any_floats(out_address, (tokens, H), (out_row, 1))
        weights = floats(weights_address, (tokens, K), FLOAT32, (weights_row, 1))
        inverse = view(inverse_address, (tokens, K), T.int32)
        with T.Kernel(1) as _:
            total = T.alloc_local((_STRIP,), T.float32)
            for t in T.serial(lo, hi):
                for strip in T.serial((H + _STRIP - 1) // _STRIP):
                    left = strip * _STRIP
                    columns = T.min(T.int64(_STRIP), H - left)
                    for h in T.serial(columns):
                        total[h] = T.float32(0)
                    for k in T.serial(K):
                        r: T.int64 = inverse[t, k]
                        if r >= 0 and r < R:
                            for f in FORMATS.values():
                                if fmt == f:
                                    for h in T.serial(columns):
                                        total[h] += weights[t, k] * widen(
                                            rows[f][r // slab, r % slab, left + h], f
                                        )
                    for f in FORMATS.values():
                        if out_fmt == f:
                            for h in T.serial(columns):
                                out[f][t, left + h] = narrow(total[h] * scale, f)

    return kernel


def refuse(*args, **named) -> str | None:
    """Say why these kernels cannot serve a call, or return None."""
    return compiler.refusal()


def refuse_pre(hidden_states, local_expert_ids, layout, num_local_experts, target) -> str | None:
    """Say why this kernel cannot serve a call, or return None."""
    return layout.too_large(local_expert_ids.numel(), num_local_experts) or compiler.refusal()


def moe_pre_permute_fwd(hidden_states, local_expert_ids, layout, num_local_experts, target):
    """Return the tokens' rows in expert order, the layout's metadata, and where each route went."""
    tokens, K = local_expert_ids.shape
    E, H = num_local_experts, hidden_states.shape[1]
    lead = layout.expert_shape(tokens * K, E)
    R = math.prod(lead)
    kind, align, slab = _MASKED, 1, 0
    if isinstance(layout, MaskedLayoutSpec):
        slab = layout.max_m
    else:
        kind = _PSUM if layout.metadata == "physical_psum" else _PER_ROW
        align = layout.alignment
    expert_input = hidden_states.new_empty(*lead, H)
    metadata = local_expert_ids.new_empty(layout.metadata_shape(R, E))
    inverse = local_expert_ids.new_empty(tokens * K)
    cursor, source = inverse.new_empty(E), inverse.new_empty(R)
    size = hidden_states.element_size()
    kernel = build_pre(compiler.level().name)
    arguments = (
        *(hidden_states.data_ptr(), local_expert_ids.data_ptr(), expert_input.data_ptr()),
        *(metadata.data_ptr(), inverse.data_ptr(), cursor.data_ptr(), source.data_ptr()),
        *(tokens, K, E, R, H * size, hidden_states.stride(0) * size, local_expert_ids.stride(0)),
        *(kind, align, slab),
    )
    grain = -(-_THREAD_BYTES // max(H * size, 1))
    if 2 * grain > R:
        kernel(*arguments, 1, 0, R)
    else:
        kernel(*arguments, 1, 0, 0)
        parallel(R, grain, lambda lo, hi: kernel(*arguments, 0, lo, hi))
    return expert_input, metadata, inverse


def moe_post_permute_fwd(
    expert_output, topk_weights, inverse_indices, layout, routed_scaling_factor, target, out
) -> None:
    """Write each token's weighted sum of rows, in the order of k; dropped routes read no row."""
    tokens, K = topk_weights.shape
    H = out.shape[1]
    R = math.prod(expert_output.shape[:-1])
    # a matrix is a slab of one expert
    slab = layout.max_m if isinstance(layout, MaskedLayoutSpec) else max(R, 1)
    kernel = build_post(compiler.level().name)
    arguments = (
        *(expert_output.data_ptr(), topk_weights.data_ptr(), inverse_indices.data_ptr()),
        *(out.data_ptr(), tokens, H, K, R, slab, expert_output.stride(0), expert_output.stride(-2)),
        *(topk_weights.stride(0), out.stride(0)),
        *(FORMATS[expert_output.dtype], FORMATS[out.dtype], float(routed_scaling_factor)),
    )
    traffic = H * (K * expert_output.element_size() + out.element_size())
    parallel(
        tokens, -(-_THREAD_BYTES // max(traffic, 1)), lambda lo, hi: kernel(*arguments, lo, hi)
    )
