"""What is compiled into an FP8 grouped GEMM on Hopper, and the sizes that follow from it."""

from dataclasses import dataclass

from tileops.kernels.cuda.activations import GATED
from tileops.kernels.cuda.sm90.tile import (
    CHUNK,
    HALF,
    MATH_GROUPS,
    STEP,
    WARP,
    WARPGROUP,
    WEIGHTS,
)

LOW, HIGH = 64, 128
"""Most rows of a low tile and of a high one."""
DEPTH = 128
"""Columns of a block, which share a scale: the bytes of one swizzled row of shared memory."""
VECTOR = 16
"""FP8 numbers of the 16 bytes that a thread moves at a time."""


@dataclass(frozen=True)
class Form:
    """The compiled-in choices.

    Attributes:
        out_dtype: Type of the results; ``"uint8"`` for FP8 rows with scales.
        has_bias: Whether there is any bias.
        activation: ``"none"`` or the name of an activation.
        role: As in `multiply_tiles`.
        block_m: Most rows of a tile: `HIGH`, or `LOW` where there are no high ones.
        stages: Loads in flight.
    """

    out_dtype: str
    has_bias: bool
    activation: str
    role: str
    block_m: int
    stages: int

    def __post_init__(self) -> None:
        if self.quantizes and self.parts == 1:
            raise ValueError(f"FP8 rows come from a gated activation, got {self.activation}")
        if self.block_m not in (LOW, HIGH):
            raise ValueError(f"block_m: takes {LOW} and {HIGH}, got {self.block_m}")

    @property
    def parts(self) -> int:
        """Matrices that are multiplied: gate and up, or one."""
        return 2 if self.activation in GATED else 1

    @property
    def columns(self) -> int:
        """Columns of a tile's results."""
        return WEIGHTS // self.parts

    @property
    def own(self) -> int:
        """Those of one warpgroup."""
        return self.columns // MATH_GROUPS

    @property
    def high(self) -> bool:
        """Whether there are high tiles."""
        return self.block_m > LOW

    @property
    def scales(self) -> int:
        """Scales of a stage: of the rows, of each warpgroup's gate rows, of its up rows."""
        return self.block_m + 2 * MATH_GROUPS

    @property
    def gathers(self) -> bool:
        """Whether rows are loaded from where ``sources`` says."""
        return self.role == "first"

    @property
    def quantizes(self) -> bool:
        """Whether results are rounded to FP8."""
        return self.out_dtype == "uint8"

    @property
    def staged(self) -> bool:
        """Whether results go through shared memory, in order to be stored as whole lines."""
        return self.out_dtype != "float32"

    @property
    def out_bytes(self) -> int:
        """Bytes of a staged result."""
        return 1 if self.quantizes else 2

    @property
    def packed(self) -> int:
        """Staged results in 16 bytes."""
        return 16 // self.out_bytes

    # Lines are one vector longer than their data, so that neighbours meet other banks.

    @property
    def low_line(self) -> int:
        """From one staged row of a low tile to the next: all columns of a warpgroup."""
        return self.own + self.packed

    @property
    def high_line(self) -> int:
        """From one staged row of a high tile to the next: a span of columns."""
        return HALF + self.packed

    @property
    def staged_size(self) -> int:
        """Results that a warpgroup stages at a time."""
        of_high = WARPGROUP // WARP * STEP * self.high_line if self.high else 0
        return max(CHUNK * self.low_line, of_high)
