"""What a random test is made of: settings that hypothesis draws and shrinks, values from a seed."""

import torch
from hypothesis import strategies as st

from tileops.moe import ContiguousLayoutSpec, MaskedLayoutSpec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
AROUND_OUTPUT = 12344.0  # a number that every dtype has


class Draw:
    def __init__(self, data):
        self.data = data
        self.make = torch.Generator().manual_seed(self.size("seed", 0, 2**16))

    def size(self, name, low, high):
        return self.data.draw(st.integers(low, high), name)

    def choice(self, name, *options):
        return self.data.draw(st.sampled_from(options), name)

    def flag(self, name):
        return self.choice(name, False, True)

    def dtype(self):
        return self.choice("dtype", *DTYPES)

    def layout(self):
        kind = self.choice("layout", "physical_psum", "per_row", "masked")
        if kind == "masked":
            return MaskedLayoutSpec(self.size("max_m", 1, 8))
        return ContiguousLayoutSpec(kind, self.size("alignment", 1, 9))

    def normal(self, *shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(shape, generator=self.make) * scale).to(dtype)

    def integers(self, low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=self.make)

    def shuffled(self, num_rows, width, reach=4.0):
        """Rows of evenly spaced values in ``[-reach, reach]``, shuffled: no two are near."""
        order = torch.rand(num_rows, width, generator=self.make).argsort(-1)
        return torch.linspace(-reach, reach, width)[order]

    def sprinkled(self, x, *specials):
        """Put special values in the place of a tenth of ``x``, or leave all as they are."""
        if not self.flag("special values"):
            return x
        which = self.integers(0, len(specials) - 1, *x.shape)
        rare = torch.rand(x.shape, generator=self.make) < 0.1
        return torch.where(rare, torch.tensor(specials)[which].to(x.dtype), x)

    def ids(self, num_tokens, top_k, num_experts):
        """Expert ids: few experts or all, and possibly some that do not exist."""
        high = num_experts - 1 if self.flag("spread") else min(1, num_experts - 1)
        ids = self.integers(0, high, num_tokens, top_k)
        if self.flag("dropped ids"):
            lost = self.integers(0, 3, num_tokens, top_k)
            ids = torch.where(lost == 0, -1, torch.where(lost == 1, num_experts, ids))
        return self.view(ids.int())

    def maybe(self, name, x):
        return self.view(x) if self.flag(name) else None

    def view(self, x, repeated=True):
        """Give ``x`` other strides; what lies between its elements is NaN, or a wild number."""
        kinds = ["contiguous", "apart", *(["moved"] if x.ndim > 2 else [])]
        kind = self.choice("strides", *kinds, *(["repeated"] if repeated and x.ndim > 1 else []))
        if kind == "contiguous":
            return x
        if kind == "repeated":
            return x[:1].expand_as(x)
        around = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max // 2 + 1
        return self._room(x.shape, x.dtype, around, kind == "moved")[1].copy_(x)

    def out(self, shape, dtype):
        """A buffer to write into, with room around each row, and what lies around it too."""
        buffer, view = self._room(shape, dtype, AROUND_OUTPUT, moved=False)
        return view, buffer

    def _room(self, shape, dtype, around, moved):
        axes = list(range(len(shape)))
        order = [*axes[-2::-1], axes[-1]] if moved else axes
        before, after = self.integers(0, 3, 2, len(shape)).tolist()
        sizes = [b + shape[axis] + a for b, axis, a in zip(before, order, after, strict=True)]
        buffer = torch.full(sizes, around, dtype=dtype)
        inside = [slice(b, b + shape[axis]) for b, axis in zip(before, order, strict=True)]
        return buffer, buffer[tuple(inside)].permute([order.index(axis) for axis in axes])


def assert_untouched_around(view, buffer):
    """Nothing of ``buffer`` but ``view`` was written; spends the view's values."""
    view.fill_(AROUND_OUTPUT)
    assert (buffer == AROUND_OUTPUT).all(), "memory around the output was written"


def ranks_clearly(values, groups=1, of_a_group=1):
    """Say which rows have no near-ties, between values or between the best sums of groups.

    Equal values are none, as they are equal however they are computed. Equal sums of others are.
    """

    def clear(x, or_equal):
        gaps = x.nan_to_num(-9.0).sort().values.diff()
        return ((gaps > 1e-5) | ((gaps == 0) & or_equal)).all(-1)

    best = values.unflatten(-1, (groups, -1)).sort(descending=True).values[..., :of_a_group]
    return clear(values, True) & clear(best.sum(-1), best.shape[-1] == 1)
