import pytest
import torch

from tileops.layouts import parse_layout
from tileops.moe import (
    ContiguousLayoutSpec,
    MaskedLayoutSpec,
    MoEPrePermuteFwdOp,
    RoutingEpilogueSpec,
)

SPECS = {
    "ContiguousLayoutSpec.tight_physical_psum()": ContiguousLayoutSpec.tight_physical_psum,
    "ContiguousLayoutSpec.aligned_physical_psum(128)": lambda: (
        ContiguousLayoutSpec.aligned_physical_psum(128)
    ),
    "ContiguousLayoutSpec.tight_per_row()": ContiguousLayoutSpec.tight_per_row,
    "ContiguousLayoutSpec.aligned_per_row(4)": lambda: ContiguousLayoutSpec.aligned_per_row(4),
    "MaskedLayoutSpec(max_m=8)": lambda: MaskedLayoutSpec(8),
    "RoutingEpilogueSpec(routed_scaling_factor=2.5)": lambda: RoutingEpilogueSpec(2.5),
}


@pytest.mark.parametrize("text", SPECS)
def test_repr_is_the_preset_call_and_equal_specs_hash_alike(text):
    spec = SPECS[text]()
    assert repr(spec) == text
    assert eval(text) == spec
    assert hash(eval(text)) == hash(spec)
    assert len({s() for s in SPECS.values()}) == len(SPECS)
    with pytest.raises(AttributeError):
        spec.alignment = 3


@pytest.mark.parametrize("text", [t for t in SPECS if "Layout" in t])
def test_parsing_gives_the_spec_back(text):
    assert parse_layout(text) == SPECS[text]()


@pytest.mark.parametrize("text", ["", "tight", "MaskedLayoutSpec(max_m=-1)", "__import__('os')"])
def test_parsing_takes_nothing_else(text):
    with pytest.raises(ValueError, match="layout must be the repr of a layout spec"):
        parse_layout(text)


def test_capacity_is_rounded_up_to_the_alignment():
    spec = ContiguousLayoutSpec.aligned_physical_psum(16)
    assert spec.expert_shape(num_routes=10, num_experts=3) == (64,)  # 10 + 3 * 15 = 55
    assert ContiguousLayoutSpec.tight_per_row().expert_shape(10, 3) == (10,)
    assert MaskedLayoutSpec(5).expert_shape(10, 3) == (3, 5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: MaskedLayoutSpec(0),
            ValueError,
            "MaskedLayoutSpec: max_m must be at least 1, got 0",
        ),
        (
            lambda: MaskedLayoutSpec(2.0),
            TypeError,
            "MaskedLayoutSpec: max_m must be an int, got 2.0",
        ),
        (
            lambda: ContiguousLayoutSpec.aligned_per_row(0),
            ValueError,
            "ContiguousLayoutSpec: alignment must be at least 1, got 0",
        ),
        (
            lambda: RoutingEpilogueSpec(0.0),
            ValueError,
            "must be finite and positive in float32, got 0.0",
        ),
        (
            lambda: RoutingEpilogueSpec(float("inf")),
            ValueError,
            "must be finite and positive in float32, got inf",
        ),
        (lambda: RoutingEpilogueSpec("2"), TypeError, "must be a number, got '2'"),
    ],
)
def test_wrong_specs(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("value", [1e39, 1e-50, 10**400, float("nan")])
def test_a_factor_must_be_one_in_float32(value):
    with pytest.raises(ValueError, match="must be finite and positive in float32"):
        RoutingEpilogueSpec(value)


def test_rows_are_numbered_in_int32():
    assert MaskedLayoutSpec(2**23).too_large(8, 255) is None
    assert "fewer than 2**31 rows" in (MaskedLayoutSpec(2**23).too_large(8, 256) or "")
    aligned = ContiguousLayoutSpec.aligned_per_row(2**31)
    with pytest.raises(ValueError, match=r"takes fewer than 2\*\*31 rows, got .*aligned_per_row"):
        MoEPrePermuteFwdOp(aligned, 3, target="cpu")(torch.ones(2, 8), torch.zeros(2, 1).int())
