"""PhiMoE's routing on the CPU: two experts, each weighed against the logits close to its own."""

import tilelang.cpu.language as T
import torch

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.activations import exp_of_negative
from tileops.kernels.cpu.floats import FLOAT32, FORMATS, any_floats, floats, view
from tileops.kernels.cpu.ranking import TAKEN, find, key_of, read_scores
from tileops.kernels.cpu.threads import parallel

_NEAR = 0.02  # twice the jitter of 0.01 that training adds
_THREAD_STEPS = 1 << 17  # least work that pays for a thread: about 50 us


@compiler.jit
def build(level: str):
    """Build the kernel of all dtypes, for E experts.

    Args:
        level: Name of the vector level.
    """

    @T.prim_func
    def kernel(
        logits_address: T.Tensor[(1,), T.uint8],
        weights_address: T.Tensor[(1,), T.uint8],
        ids_address: T.Tensor[(1,), T.uint8],
        scores_address: T.Tensor[(1,), T.uint8],
        keys_address: T.Tensor[(1,), T.uint8],
        tokens: T.int64,
        E: T.int64,
        row: T.int64,
        fmt: T.int32,
        lo: T.int64,
        hi: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags(level))
        logits = any_floats(logits_address, (tokens, E), (row, 1))
        weights = floats(weights_address, (tokens, 2), FLOAT32)
        ids = view(ids_address, (tokens, 2), T.int32)
        scores = floats(scores_address, (E,), FLOAT32)
        keys = view(keys_address, (E,), T.int32)
        with T.Kernel(1) as _:
            best = T.alloc_local((2,), T.int32)
            scratch = T.alloc_local((3,), T.float64)
            total = T.alloc_var(T.float64)
            top = T.alloc_var(T.float32)
            for t in T.serial(lo, hi):
                read_scores(logits, fmt, t, scores, E)
                for e in T.serial(E):
                    keys[e] = key_of(scores[e])
                for k in T.serial(2):
                    find(keys, (0, E), best)
                    top = scores[best[1]]
                    total = 0
                    for e in T.serial(E):
                        exp_of_negative(
                            T.cast(scores[e], "float64") - T.cast(top, "float64"), scratch
                        )
                        # a comparison with NaN is false: NaN is not far, and reaches the sum
                        reach = T.float32(_NEAR) * T.max(T.max(scores[e], -scores[e]), top)
                        term = T.Select(top - scores[e] > reach, T.float64(0), scratch[0])
                        total += T.Select(keys[e] == T.int32(TAKEN), T.float64(0), term)
                    keys[best[1]] = T.int32(TAKEN)
                    ids[t, k] = best[1]
                    weights[t, k] = T.cast(T.float64(1) / total, "float32")

    return kernel


def refuse(*args, **named) -> str | None:
    """Say why this kernel cannot serve a call, or return None."""
    return compiler.refusal()


def sparse_mixer_fwd(logits, *, target):
    """Return each token's two weights and expert ids; the first does not count for the second."""
    tokens, E = logits.shape
    weights = logits.new_empty(tokens, 2, dtype=torch.float32)
    ids = logits.new_empty(tokens, 2, dtype=torch.int32)
    kernel = build(compiler.level().name)
    addresses = logits.data_ptr(), weights.data_ptr(), ids.data_ptr()
    numbers = tokens, E, logits.stride(0), FORMATS[logits.dtype]

    def select(lo: int, hi: int) -> None:
        scores = torch.empty(E, dtype=torch.float32)
        keys = torch.empty(E, dtype=torch.int32)
        kernel(*addresses, scores.data_ptr(), keys.data_ptr(), *numbers, lo, hi)

    parallel(tokens, -(-_THREAD_STEPS // (E * 10)), select)
    return weights, ids
