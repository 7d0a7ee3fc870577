"""Quantize-dequantize of weights against slow references (`reference.py`, `reference_floats.py`): values, codes, gradients.

First integers, then floating point, then other implementations.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import forward as peer
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference_floats as tables
from evenround.numerics import grouping
from evenround.numerics.elements import E4M3, element_of
from evenround.numerics.grouping import from_groups, to_groups
from evenround.numerics.quantized import QuantizedWeight
from evenround.numerics.weights import clip_count, global_scale, group_limits, parameter_gradients, power_scale, qdq, quantize
from evenround.scheme import WeightScheme
from reference import Array, quantize_by_loops, ranges, straight_through

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# ---------------------------------------------------------------------------------------------------------------------------------------
# Cases


class QDQ(torch.autograd.Function):
    """`qdq` and `parameter_gradients` as one differentiable function, so that autograd can be asked for gradients."""

    @staticmethod
    def forward(ctx, rows, offset, limits, scheme, dtype, whole, *clips):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, offset, *clips)
        ctx.limits, ctx.scheme, ctx.whole = limits, scheme, whole
        return qdq(rows, offset, clips, limits, scheme, dtype, whole)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        rows, offset, *clips = ctx.saved_tensors
        offset_gradient, *clip_gradients = parameter_gradients(grads[0], rows, offset, clips, ctx.limits, ctx.scheme, ctx.whole)
        return None, offset_gradient, None, None, None, None, *clip_gradients


@dataclass(frozen=True)
class Case:
    """A weight `[out, in]` and tuning parameters, all drawn from `seed`."""

    scheme: WeightScheme
    shape: tuple[int, int]
    kind: str
    clips: str
    seed: int

    def generator(self, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed(10 * self.seed + purpose)

    @property
    def count(self) -> int:
        return len(tables.tiles(*self.shape, self.scheme.group_size))

    def weight(self) -> Tensor:
        """float64 `[out, in]`."""
        return (KINDS | EXTREMES)[self.kind](torch.randn(self.shape, generator=self.generator(0), dtype=torch.float64))

    def offset(self) -> Tensor:
        """V, float64 `[out, in]`, within half a step and a little beyond."""
        return torch.rand(self.shape, generator=self.generator(1), dtype=torch.float64) * 1.2 - 0.6

    def clip_pair(self) -> tuple[Tensor, Tensor]:
        """Two times float64 `[groups]` in [0, 1]; `mixed` has 0, 1 and what is between."""
        drawn = torch.rand((2, self.count), generator=self.generator(2), dtype=torch.float64)
        if self.clips == "mixed":
            low, high = (drawn * 1.6 - 0.3).clamp(0, 1)
        else:
            low, high = torch.full_like(drawn, float(self.clips))
        return low, high


def _with_zero_rows(weight: Tensor) -> Tensor:
    weight = weight.clone()
    weight[::2] = 0
    return weight


def _with_outlier(weight: Tensor) -> Tensor:
    weight = weight.clone()
    weight[0, -1] *= 1000
    return weight


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda weight: weight,
    "small": lambda weight: weight * 0.02,
    "huge": lambda weight: weight * 1e4,
    "tiny": lambda weight: weight * 1e-7,
    "around the smallest scale": lambda weight: weight * 1e-4,
    "all zero": lambda weight: weight * 0,
    "zero rows": _with_zero_rows,
    "equal": lambda weight: torch.full_like(weight, float(weight[0, 0])),
    "positive": lambda weight: weight.abs() + 0.1,
    "negative": lambda weight: -weight.abs() - 0.1,
    "outlier": _with_outlier,
    "few values": lambda weight: weight.clamp(-2, 2).round() * 0.37,
}

EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "subnormal scales": lambda weight: weight * 1e-37,
    "subnormal": lambda weight: weight * 1e-41,
    "smallest": lambda weight: weight * 1e-44,
    "enormous": lambda weight: weight.clamp(-4, 4) * 5e37,
}
"""What float16 scales cannot hold."""

schemes = st.builds(WeightScheme, bits=st.integers(2, 8), group_size=st.sampled_from([16, 16, 24, 32, 128, -1, 0]), symmetric=st.booleans())


def cases_of(*kinds: str) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        scheme=schemes,
        shape=st.tuples(st.integers(1, 5), st.sampled_from([1, 7, 16, 32, 33, 48, 70])),
        kind=st.sampled_from(kinds),
        clips=st.sampled_from(["1", "mixed", "mixed", "0"]),
        seed=st.integers(0, 10**6),
    )


cases = cases_of(*sorted(KINDS))


def scheme(bits: int = 4, group_size: int = 16, symmetric: bool = True) -> WeightScheme:
    return WeightScheme(bits=bits, group_size=group_size, symmetric=symmetric)


BOTH = pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])


def column(values: Tensor) -> Tensor:
    return values.reshape(-1, 1)


def forward(case: Case, weight: Tensor, offset: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """W' `[out, in]` the way tuning computes it."""
    rows = to_groups(weight, case.scheme.group_size)
    limits = group_limits(rows, case.scheme)
    moved = to_groups(offset, case.scheme.group_size)
    result = QDQ.apply(rows, moved, limits, case.scheme, dtype, None, column(low), column(high))
    return from_groups(result, case.shape, case.scheme.group_size)


def array(tensor: Tensor) -> Array:
    return tensor.to(torch.float32).numpy().astype(numpy.float32)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Values


@quick
@given(case=cases, tuned=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_codes_scales_and_values_equal_the_loops(case: Case, tuned: bool, dtype: torch.dtype) -> None:
    weight = case.weight().to(dtype)
    offset, (low, high) = case.offset().float(), (clip.float() for clip in case.clip_pair())
    if tuned:
        moved = to_groups(offset, case.scheme.group_size)
        found = quantize(weight, case.scheme, moved, (column(low), column(high)))
        pairs = list(zip(low.tolist(), high.tolist(), strict=True))
    else:
        found = quantize(weight, case.scheme)
        pairs = None
    loops = quantize_by_loops(
        array(weight), case.scheme.bits, case.scheme.group_size, case.scheme.symmetric, array(offset) if tuned else None, pairs
    )
    assert found.scale.flatten().tolist() == loops.scales
    assert found.zero_point is not None and found.zero_point.flatten().tolist() == loops.zeros
    assert found.codes.tolist() == loops.codes
    assert torch.equal(found.dequantize(), torch.from_numpy(loops.dequantized))


@quick
@given(case=cases)
def test_what_is_exported_is_what_was_tuned(case: Case) -> None:
    """`quantize` gives the very values that `qdq` put into the block, bit for bit, in every compute dtype."""
    weight, offset = case.weight().float(), case.offset().float()
    low, high = (clip.float() for clip in case.clip_pair())
    exported = quantize(weight, case.scheme, to_groups(offset, case.scheme.group_size), (column(low), column(high)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        used = forward(case, weight, offset, low, high, dtype)
        assert used.dtype == dtype and torch.equal(used, exported.dequantize(dtype))


@quick
@given(case=cases)
def test_a_quantized_weight_is_within_its_bounds(case: Case) -> None:
    found = quantize(case.weight().float(), case.scheme)
    top, shape = 2**case.scheme.bits - 1, case.scheme.scale_shape(case.shape)
    assert found.codes.dtype == found.zero_point.dtype == torch.uint8 and found.scale.dtype == torch.float16
    assert found.codes.shape == case.shape and found.codes.is_contiguous()
    assert found.scale.shape == found.zero_point.shape == shape and math.prod(shape) == case.count
    assert int(found.codes.max()) <= top and int(found.zero_point.max()) <= top
    assert float(found.scale.abs().min()) >= 1e-5
    if case.scheme.symmetric:
        assert bool((found.zero_point == 2 ** (case.scheme.bits - 1)).all())
    else:
        assert bool((found.scale > 0).all())


@quick
@given(case=cases)
def test_no_weight_moves_by_more_than_its_step(case: Case) -> None:
    """Half a step asymmetric; symmetric a whole one, for the weight just below the largest has no code of its own above half."""
    weight = case.weight().float()
    found = quantize(weight, case.scheme)
    steps = found.scale.float().abs().flatten().tolist()
    error = (weight - found.dequantize()).abs()
    for number, (rows, columns) in enumerate(ranges(*case.shape, case.scheme.group_size)):
        rounding_of_scale = 2**case.scheme.bits * 2.0**-11
        assert float(error[rows, columns].max()) <= steps[number] * ((1 if case.scheme.symmetric else 0.5) + rounding_of_scale + 1e-3)


@quick
@given(case=cases)
@example(case=Case(scheme(), (4, 48), "small", "1", 0))
def test_quantizing_again_changes_nothing(case: Case) -> None:
    """True of all symmetric weights, and of asymmetric groups that use their first and last code."""
    once = quantize(case.weight().float(), case.scheme)
    values = once.dequantize()
    twice = quantize(values, case.scheme)
    for number, (rows, columns) in enumerate(ranges(*case.shape, case.scheme.group_size)):
        codes = once.codes[rows, columns]
        whole = int(codes.min()) == 0 and int(codes.max()) == 2**case.scheme.bits - 1
        if case.scheme.symmetric or whole:
            assert torch.equal(twice.dequantize()[rows, columns], values[rows, columns])
        if whole:
            assert float(twice.scale.flatten()[number]) == float(once.scale.flatten()[number])
            assert torch.equal(twice.codes[rows, columns], codes)


@quick
@given(case=cases_of("normal", "positive", "negative", "huge", "outlier", "equal"))
def test_the_largest_weight_of_a_symmetric_group_has_code_zero(case: Case) -> None:
    weight = case.weight().float()
    found = quantize(weight, WeightScheme(bits=case.scheme.bits, group_size=case.scheme.group_size))
    scales = found.scale.flatten()
    for number, (rows, columns) in enumerate(ranges(*case.shape, case.scheme.group_size)):
        part = weight[rows, columns]
        extreme = part.abs().argmax()
        assert int(found.codes[rows, columns].flatten()[extreme]) == 0
        assert (float(scales[number]) < 0) == (float(part.flatten()[extreme]) > 0)


@quick
@given(case=cases_of("normal", "positive", "negative", "outlier"), power=st.integers(-3, 3))
def test_mirror_and_size_change_scales_only(case: Case, power: int) -> None:
    """-W has the symmetric codes of W with the other sign of scale; 2^k W has all codes of W with 2^k the scale."""
    weight = case.weight().float()
    plain, larger = quantize(weight, case.scheme), quantize(weight * 2.0**power, case.scheme)
    assume(float(torch.minimum(plain.scale, larger.scale).abs().min()) > 7e-5)  # float16 has all its digits
    assert torch.equal(plain.codes, larger.codes) and torch.equal(plain.zero_point, larger.zero_point)
    assert torch.equal(plain.scale * 2.0**power, larger.scale)
    if case.scheme.symmetric:
        mirrored = quantize(-weight, case.scheme)
        assert torch.equal(plain.codes, mirrored.codes) and torch.equal(plain.scale, -mirrored.scale)


@BOTH
@pytest.mark.parametrize("group_size", [16, -1, 0])
def test_zeros_stay_zero(symmetric: bool, group_size: int) -> None:
    weight = torch.zeros(3, 32)
    found = quantize(weight, scheme(4, group_size, symmetric))
    assert torch.equal(found.dequantize(), weight)
    assert set(found.scale.flatten().tolist()) == {float(numpy.float16(1e-5))}
    assert set(found.codes.flatten().tolist()) == set(found.zero_point.flatten().tolist()) == {8 if symmetric else 0}


@BOTH
@pytest.mark.parametrize("value", [0.013, -0.013, 1.0, -250.0])
def test_equal_values_stay_themselves_but_for_float16(symmetric: bool, value: float) -> None:
    found = quantize(torch.full((2, 32), value), scheme(3, 16, symmetric)).dequantize()
    torch.testing.assert_close(found, torch.full((2, 32), value), rtol=2**-10, atol=0)


def test_a_tie_of_both_ends_goes_to_the_positive_side() -> None:
    weight = torch.linspace(-1, 1, 16).reshape(1, 16)
    found = quantize(weight, scheme())
    assert float(found.scale) == -0.125
    assert int(found.codes[0, -1]) == 0 and int(found.codes[0, 0]) == 15


def test_halves_go_to_the_even_code() -> None:
    weight = torch.tensor([[-8.0, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 6.5] * 2])
    assert (quantize(weight, scheme()).codes[0, :8].int() - 8).tolist() == [-8, -2, -2, 0, 0, 2, 2, 6]


def test_a_weight_without_rows_is_an_empty_one() -> None:
    for group_size in (16, -1):
        found = quantize(torch.zeros(0, 32), scheme(4, group_size))
        assert found.codes.shape == (0, 32) and found.dequantize().shape == (0, 32)
        assert found.scale.shape == found.zero_point.shape == (0, 2 if group_size == 16 else 1)


def test_a_float64_weight_is_quantized_as_float32() -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for symmetric in (True, False):
        double, single = (quantize(kind, scheme(8, 16, symmetric)) for kind in (weight, weight.float()))
        assert torch.equal(double.codes, single.codes) and torch.equal(double.scale, single.scale)
    with pytest.raises(OverflowError, match="does not fit float16"):
        quantize(weight * 1e9, scheme())


@pytest.mark.parametrize(
    ("symmetric", "low", "high", "message"),
    [
        (True, -1e6, 2.0, "a scale of magnitude 1.25e+05 does not fit float16"),
        (True, 0.0, 1.6e6, "a scale of magnitude 2e+05 does not fit float16"),
        (False, -1e6, 1.4e6, "a scale of magnitude 1.6e+05 does not fit float16"),
        (True, 0.0, math.inf, "a scale of magnitude inf does not fit float16"),
        (False, 0.0, math.nan, "a scale of magnitude nan does not fit float16"),
    ],
)
def test_a_scale_beyond_float16_is_refused(symmetric: bool, low: float, high: float, message: str) -> None:
    weight = torch.zeros(2, 32)
    weight[1, 20], weight[1, 21] = low, high
    with pytest.raises(OverflowError) as caught:
        quantize(weight, scheme(4, 16, symmetric))
    assert str(caught.value) == message


def test_the_largest_scale_of_float16_is_accepted() -> None:
    weight = torch.full((1, 16), -8 * 65504.0)
    assert torch.equal(quantize(weight, scheme()).dequantize(), weight)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Groups and chunks


@quick
@given(case=cases)
def test_groups_hold_the_weights_in_order(case: Case) -> None:
    weight = case.weight()
    rows = to_groups(weight, case.scheme.group_size)
    assert len(rows) == case.count
    for row, (where, columns) in zip(rows, ranges(*case.shape, case.scheme.group_size), strict=True):
        part = weight[where, columns].flatten()
        assert torch.equal(row[: len(part)], part) and not row[len(part) :].any()
    assert torch.equal(from_groups(rows, case.shape, case.scheme.group_size), weight)
    if case.scheme.group_size <= 0 or case.shape[1] % case.scheme.group_size == 0:
        assert rows.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("group_size", [16, -1, 0])
@BOTH
def test_the_size_of_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch, group_size: int, symmetric: bool) -> None:
    case = Case(scheme(3, group_size, symmetric), (9, 48), "normal", "mixed", 3)
    weight, offset = case.weight().float(), case.offset().float()
    low, high = (clip.float() for clip in case.clip_pair())
    upstream = torch.randn(case.shape, generator=torch.Generator().manual_seed(4))

    def everything() -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in (offset, low, high)]
        values = forward(case, weight, *leaves, torch.float32)
        values.backward(upstream)
        exported = quantize(weight, case.scheme, to_groups(offset, group_size), (column(low), column(high)))
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(gradients) == 3
        return values.detach(), exported.codes, exported.scale, exported.zero_point, *gradients

    whole = everything()
    for size in (1, 17, 100):
        monkeypatch.setattr(grouping, "CHUNK", size)
        for part, expected in zip(everything(), whole, strict=True):
            assert torch.equal(part, expected)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Gradients


def gradients_of(case: Case, dtype: torch.dtype, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W' and the gradients of V `[out, in]` and both clips `[groups]`."""
    offset = case.offset().to(dtype).requires_grad_()
    low, high = (clip.to(dtype).requires_grad_() for clip in case.clip_pair())
    values = forward(case, case.weight().to(dtype), offset, low, high, dtype)
    values.backward(upstream.to(dtype))
    assert offset.grad is not None and low.grad is not None and high.grad is not None
    return values.detach(), offset.grad, low.grad, high.grad


def reference_gradients(case: Case, dtype: torch.dtype, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """The same by autograd through the slow reference, in float64 on inputs rounded to `dtype`; and the margin of its decisions."""
    offset = case.offset().to(dtype).double().requires_grad_()
    low, high = (clip.to(dtype).double().requires_grad_() for clip in case.clip_pair())
    weight = case.weight().to(dtype).double()
    smooth = straight_through(
        weight, offset, low, high, case.scheme.bits, case.scheme.group_size, case.scheme.symmetric, dtype != torch.float64
    )
    smooth.dequantized.backward(upstream.to(dtype).double())
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (offset, low, high)]
    return smooth.dequantized.detach(), found[0], found[1], found[2], smooth.margin


def check_gradients(case: Case, dtype: torch.dtype, margin: float, relative: float) -> None:
    upstream = torch.randn(case.shape, generator=case.generator(3), dtype=torch.float64)
    *expected, found_margin = reference_gradients(case, dtype, upstream)
    assume(found_margin > margin)
    values, *found = gradients_of(case, dtype, upstream)
    torch.testing.assert_close(values.double(), expected[0], rtol=relative, atol=relative * float(expected[0].abs().max()))
    torch.testing.assert_close(found[0].double(), expected[1], rtol=relative, atol=0)
    # A clip's gradient is a sum over its group in which terms of this size cancel.
    parts = ranges(*case.shape, case.scheme.group_size)
    weight = case.weight()
    for number, (rows, columns) in enumerate(parts):
        size = float(upstream[rows, columns].abs().sum() * weight[rows, columns].abs().max())
        for mine, other in ((found[1], expected[2]), (found[2], expected[3])):
            assert abs(float(mine[number]) - float(other[number])) <= relative * (size + abs(float(other[number])))


@settings(quick, max_examples=120)
@given(case=cases)
def test_gradients_are_those_of_straight_through_rounding(case: Case) -> None:
    check_gradients(case, torch.float64, margin=1e-9, relative=1e-9)


@quick
@given(case=cases)
def test_gradients_of_float32_with_float16_scales_are_too(case: Case) -> None:
    """What tuning runs: the same reference, whose scales are rounded to float16 as well, on the same float32 inputs."""
    check_gradients(case, torch.float32, margin=2e-4, relative=2e-5)


@BOTH
@pytest.mark.parametrize(("kind", "clips"), [("all zero", "1"), ("all zero", "0"), ("tiny", "1"), ("positive", "0")])
def test_clips_get_no_gradient_where_the_scale_is_at_its_minimum(symmetric: bool, kind: str, clips: str) -> None:
    case = Case(scheme(4, 16, symmetric), (3, 32), kind, clips, 7)
    _, _, low, high = gradients_of(case, torch.float64, torch.ones(case.shape))
    assert not high.any()
    # The zero point still depends on the lower clip, through the smallest weight: only where something is clipped and that is not zero.
    assert not low.any() or (not symmetric and kind == "tiny")


def test_an_offset_gets_the_scale_times_the_gradient_unless_it_is_clipped() -> None:
    weight = torch.tensor([[-8.0, 7.4, 7.6, 1.0] * 4], dtype=torch.float64)
    case_offset = torch.zeros_like(weight).requires_grad_()
    ones = torch.ones(1, 1, dtype=torch.float64)
    values = QDQ.apply(weight, case_offset, group_limits(weight, scheme()), scheme(), torch.float64, None, ones, ones)
    values.backward(torch.arange(1.0, 17.0, dtype=torch.float64).reshape(1, 16))
    assert case_offset.grad is not None
    assert case_offset.grad[0, :4].tolist() == [1.0, 2.0, 0.0, 4.0]  # 7.6 rounds to 8, which is one too many


def test_the_gradient_arrives_in_any_compute_dtype() -> None:
    case = Case(scheme(2, 16, False), (4, 32), "normal", "mixed", 11)
    upstream = torch.randn(case.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [case.offset().float().requires_grad_(), *(clip.float().requires_grad_() for clip in case.clip_pair())]
        forward(case, case.weight().float(), *leaves, dtype).backward(upstream.to(dtype))
        results.append([leaf.grad for leaf in leaves])
    for single, brain in zip(*results, strict=True):
        assert single is not None and brain is not None and brain.dtype == torch.float32 and torch.equal(single, brain)


def test_the_padding_of_a_ragged_group_gets_no_gradient() -> None:
    case = Case(scheme(4, 32), (3, 40), "normal", "1", 5)
    rows = to_groups(case.weight(), 32)
    offset = torch.zeros_like(rows).requires_grad_()
    limits = group_limits(rows, case.scheme)
    ones = torch.ones_like(limits[0])
    values = QDQ.apply(rows, offset, limits, case.scheme, torch.float64, None, ones, ones)
    from_groups(values, case.shape, 32).sum().backward()
    assert offset.grad is not None
    assert not offset.grad[1::2, 8:].any() and offset.grad[1::2, :8].any()


def test_dequantize_multiplies_in_float32() -> None:
    weight = QuantizedWeight(
        codes=torch.tensor([[255, 0]], dtype=torch.uint8),
        scale=torch.tensor([[65504.0]], dtype=torch.float16),
        zero_point=torch.tensor([[1]], dtype=torch.uint8),
        scheme=scheme(8, -1, False),
    )
    assert weight.dequantize().tolist() == [[254 * 65504.0, -65504.0]]
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------------------------------------------------
# Floating point: values


FLOATS = {
    "FP8 tensor": WeightScheme(bits=8, group_size=0, dtype="fp"),
    "FP8 channel": WeightScheme(bits=8, group_size=-1, dtype="fp"),
    "FP8 128x128": WeightScheme(bits=8, group_size=(128, 128), dtype="fp"),
    "FP8 16x24": WeightScheme(bits=8, group_size=(16, 24), dtype="fp"),
    "FP8 g32": WeightScheme(bits=8, group_size=32, dtype="fp"),
    "MXFP4": WeightScheme(bits=4, group_size=32, dtype="mx_fp"),
    "MXFP8": WeightScheme(bits=8, group_size=32, dtype="mx_fp"),
    "MXFP4 rceil": WeightScheme(bits=4, group_size=32, dtype="mx_fp_rceil"),
    "MXFP8 rceil": WeightScheme(bits=8, group_size=32, dtype="mx_fp_rceil"),
    "MXINT4": WeightScheme(bits=4, group_size=32, dtype="mx_int"),
    "NVFP4": WeightScheme(bits=4, group_size=16, dtype="nv_fp"),
}
EACH_FLOAT = pytest.mark.parametrize("name", FLOATS)

float_cases = st.builds(
    Case,
    scheme=st.sampled_from(list(FLOATS.values())),
    shape=st.tuples(st.sampled_from([1, 3, 20]), st.sampled_from([1, 16, 33, 70])),
    kind=st.sampled_from(sorted(KINDS | EXTREMES)),
    clips=st.sampled_from(["1", "mixed", "mixed", "0"]),
    seed=st.integers(0, 10**6),
)


def plain(scale: Tensor) -> list[float]:
    """A stored scale as numbers: E4M3 as codes."""
    return (scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale).flatten().tolist()


def check_tables(
    weight: Tensor, scheme: WeightScheme, found: QuantizedWeight, offset: Tensor | None = None, clips: list[float] | None = None
) -> None:
    expected = tables.quantize_by_tables(weight.float(), scheme.dtype, scheme.bits, scheme.group_size, offset, clips)
    assert plain(found.scale) == expected.stored
    assert found.codes.tolist() == expected.codes
    assert torch.equal(found.dequantize(), expected.dequantized) and found.dequantize().isfinite().all()
    assert (found.global_scale is None) == (expected.whole is None)
    if found.global_scale is not None:
        assert found.global_scale.tolist() == [expected.whole] and found.global_scale.dtype == torch.float32


@quick
@given(case=float_cases, tuned=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_floats_equal_the_tables(case: Case, tuned: bool, dtype: torch.dtype) -> None:
    weight = case.weight().to(dtype)
    assume(bool(weight.isfinite().all()))
    offset, clips = case.offset().float(), case.clip_pair()[1].float()
    if tuned:
        found = quantize(weight, case.scheme, to_groups(offset, case.scheme.group_size), (column(clips),))
        check_tables(weight, case.scheme, found, offset, clips.tolist())
    else:
        check_tables(weight, case.scheme, quantize(weight, case.scheme))


@EACH_FLOAT
@pytest.mark.parametrize("kind", ["normal", "all zero", "zero rows", "outlier", "tiny", *EXTREMES])
def test_every_scheme_rounds_to_nearest_by_the_tables(name: str, kind: str) -> None:
    for shape in ((20, 70), (1, 7)):
        weight = Case(FLOATS[name], shape, kind, "1", 1).weight().float()
        check_tables(weight, FLOATS[name], quantize(weight, FLOATS[name]))


def test_tiles_that_reach_over_both_ends() -> None:
    weight = torch.randn(130, 150, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.01, 3, 150)
    found = quantize(weight, FLOATS["FP8 128x128"])
    assert found.scale.shape == (2, 2) and found.codes.is_contiguous()
    check_tables(weight, FLOATS["FP8 128x128"], found)


@quick
@given(case=float_cases)
def test_what_is_exported_is_what_was_tuned_for_floats_too(case: Case) -> None:
    weight, offset, clips = case.weight().float(), case.offset().float(), case.clip_pair()[1].float()
    exported = quantize(weight, case.scheme, to_groups(offset, case.scheme.group_size), (column(clips),))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        used = forward_float(case, weight, offset, clips, dtype)
        assert used.dtype == dtype and torch.equal(used, exported.dequantize(dtype))


@EACH_FLOAT
def test_kinds_and_shapes_of_what_is_stored(name: str) -> None:
    scheme = FLOATS[name]
    found = quantize(torch.randn(20, 70, generator=torch.Generator().manual_seed(0)), scheme)
    kinds = {"fp": torch.float32, "nv_fp": torch.float8_e4m3fn}
    assert found.codes.dtype == torch.uint8 and found.codes.shape == (20, 70) and found.zero_point is None
    assert found.scale.dtype == kinds.get(scheme.dtype, torch.uint8) and found.scale.shape == scheme.scale_shape((20, 70))
    assert clip_count(scheme) == len(group_limits(torch.zeros(2, 32), scheme)) == 1
    assert clip_count(WeightScheme(bits=4)) == 2
    assert torch.equal(found.to(torch.device("cpu")).dequantize(), found.dequantize())


@EACH_FLOAT
def test_quantizing_again_changes_nothing_for_floats(name: str) -> None:
    """Not where the largest saturates: those blocks may get a smaller exponent."""
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(5))
    once = quantize(weight, FLOATS[name])
    values = once.dequantize()
    again = quantize(values, FLOATS[name], whole=once.global_scale)
    torch.testing.assert_close(again.dequantize(), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["MXFP4", "MXFP8", "MXINT4"])
@pytest.mark.parametrize("up", [False, True])
def test_exponents_at_powers_and_at_the_largest_number(name: str, up: bool) -> None:
    """One digit to both sides of where the exponent changes, which logarithms in float32 get wrong."""
    element, table = element_of(FLOATS[name]), tables.table_of(FLOATS[name].dtype, FLOATS[name].bits)
    edges = torch.tensor([factor * 2.0**power for factor in (1.0, element.largest) for power in range(-126, 100)])
    edges = torch.cat([edges, torch.nextafter(edges, torch.tensor(0.0)), torch.nextafter(edges, torch.tensor(1e38))])
    edges = torch.cat([edges, torch.tensor([0.0, 1e-45, 1e-40, 3e38])])
    found = power_scale(edges, element, up)
    assert found.tolist() == [2.0 ** tables.mx_exponent(magnitude, table, up) for magnitude in edges.tolist()]
    assert torch.equal(power_scale(edges.double(), element, up).float(), found)
    fits = edges <= found * element.largest
    assert fits[edges < 1e38].all() if up else (edges / found < 2 * 2.0**element.largest_exponent).all()


def test_global_scales() -> None:
    found = global_scale(torch.tensor([0.0, 2688.0, 1.0, 1e-40, 1e38]))
    assert found.tolist() == [1.0, tables.nv_global(2688.0), 2688.0, 1.0, tables.nv_global(tables.single(1e38))]
    assert float(found[1]) == pytest.approx(1, abs=1e-7)
    assert global_scale(torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float32


def test_layers_that_share_a_global_scale_keep_to_their_limits() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    whole = global_scale(weight.abs().max() * 5).reshape(1)
    found = quantize(weight, FLOATS["NVFP4"], whole=whole)
    expected = tables.quantize_by_tables(weight, "nv_fp", 4, 16, whole=whole.item())
    assert plain(found.scale) == expected.stored and found.codes.tolist() == expected.codes
    assert found.global_scale is not None and torch.equal(found.global_scale, whole)


@EACH_FLOAT
def test_limits_take_the_place_of_the_weights_own(name: str) -> None:
    """Half the limits are clips of one half."""
    scheme, weight = FLOATS[name], torch.randn(20, 96, generator=torch.Generator().manual_seed(4))
    rows = to_groups(weight, scheme.group_size)
    (limit,) = group_limits(rows, scheme)
    given_limits = quantize(weight, scheme, limits=(limit / 2,))
    clipped = quantize(weight, scheme, clips=(torch.full_like(limit, 0.5),))
    assert torch.equal(given_limits.codes, clipped.codes) and plain(given_limits.scale) == plain(clipped.scale)


@EACH_FLOAT
def test_the_size_of_chunks_changes_nothing_for_floats(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = Case(FLOATS[name], (20, 70), "normal", "mixed", 3)

    def everything() -> tuple[Tensor, ...]:
        return gradients_of_float(case, torch.float32, torch.ones(20, 70)) + (quantize(case.weight().float(), case.scheme).codes,)

    whole = everything()
    for size in (1, 100):
        monkeypatch.setattr(grouping, "CHUNK", size)
        assert all(torch.equal(part, expected) for part, expected in zip(everything(), whole, strict=True))


# ---------------------------------------------------------------------------------------------------------------------------------------
# Floating point: gradients


def forward_float(case: Case, weight: Tensor, offset: Tensor, clips: Tensor, dtype: torch.dtype) -> Tensor:
    rows = to_groups(weight, case.scheme.group_size)
    limits = group_limits(rows, case.scheme)
    whole = global_scale(limits[0].amax()).reshape(1) if case.scheme.dtype == "nv_fp" else None
    moved = to_groups(offset, case.scheme.group_size)
    result = QDQ.apply(rows, moved, limits, case.scheme, dtype, whole, column(clips))
    return from_groups(result, case.shape, case.scheme.group_size)


def gradients_of_float(case: Case, dtype: torch.dtype, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W' and the gradients of V `[out, in]` and clips `[groups]`."""
    offset, clips = case.offset().to(dtype).requires_grad_(), case.clip_pair()[1].to(dtype).requires_grad_()
    values = forward_float(case, case.weight().to(dtype), offset, clips, dtype)
    values.backward(upstream.to(dtype))
    assert offset.grad is not None and clips.grad is not None
    return values.detach(), offset.grad, clips.grad


def scale_rule(scheme: WeightScheme, largest: float, exact: bool) -> Callable[[float], float]:
    """What `tables.straight_through` asks for. exact: FP8 scales and divisions are not rounded to float32."""
    table = tables.table_of(scheme.dtype, scheme.bits)
    whole = tables.single(2688 / largest) if exact and largest else tables.nv_global(largest)

    def scale(magnitude: float) -> float:
        if scheme.dtype == "fp":
            return max(magnitude / 448, 1 / (448 * 512)) if exact else tables.fp8_scale(magnitude)
        if scheme.dtype == "nv_fp":
            code = tables.E4M3.nearest(max(2.0**-9, min(448.0, tables.single(whole * (magnitude / 6)))))
            return tables.E4M3.number(code) / whole
        return 2.0 ** tables.mx_exponent(magnitude, table, scheme.dtype.endswith("rceil"))

    return scale


def check_float_gradients(case: Case, dtype: torch.dtype, margin: float, relative: float) -> None:
    upstream = torch.randn(case.shape, generator=case.generator(3), dtype=torch.float64)
    offset, clips = (leaf.to(dtype).double().requires_grad_() for leaf in (case.offset(), case.clip_pair()[1]))
    weight = case.weight().to(dtype).double()
    rule = scale_rule(case.scheme, float(weight.abs().max()), dtype == torch.float64)
    smooth = tables.straight_through(weight, offset, clips, case.scheme.dtype, case.scheme.bits, case.scheme.group_size, rule)
    assume(smooth.margin > margin)
    smooth.dequantized.backward(upstream.to(dtype).double())
    assert offset.grad is not None and clips.grad is not None
    values, offset_gradient, clip_gradients = gradients_of_float(case, dtype, upstream)
    expected = smooth.dequantized.detach()
    torch.testing.assert_close(values.double(), expected, rtol=relative, atol=relative * float(expected.abs().max()))
    torch.testing.assert_close(offset_gradient.double(), offset.grad, rtol=relative, atol=0)
    for number, (rows, columns) in enumerate(tables.tiles(*case.shape, case.scheme.group_size)):
        part = weight[rows, columns].abs()
        size = float((upstream[rows, columns].abs() * (part + expected[rows, columns].abs())).sum()) / max(
            float(clips[number].detach()), 0.01
        )
        error = abs(float(clip_gradients[number]) - float(clips.grad[number]))
        assert error <= relative * (size * 10 + abs(float(clips.grad[number])))


gradient_cases = st.builds(
    Case,
    scheme=st.sampled_from(list(FLOATS.values())),
    shape=st.tuples(st.sampled_from([1, 3]), st.sampled_from([16, 33, 70])),
    kind=st.sampled_from(["normal", "small", "huge", "outlier", "few values", "positive", "zero rows", "tiny"]),
    clips=st.sampled_from(["1", "mixed"]),
    seed=st.integers(0, 10**6),
)


@settings(quick, max_examples=120)
@given(case=gradient_cases)
def test_gradients_of_floats_are_those_of_straight_through_rounding(case: Case) -> None:
    check_float_gradients(case, torch.float64, margin=1e-9, relative=1e-9)


@quick
@given(case=gradient_cases)
def test_gradients_of_floats_in_float32_are_too(case: Case) -> None:
    check_float_gradients(case, torch.float32, margin=1e-4, relative=2e-5)


def test_an_offset_counts_in_steps_where_the_weight_lies() -> None:
    """FP4 around 5: steps of 2; around 0.6: of a half. A tenth of a step moves neither, six tenths move both."""
    weight = torch.tensor([[6.0, 5.5, 0.6, 0.1] + [0.0] * 28], dtype=torch.float64)
    scheme = FLOATS["MXFP4"]
    moves = torch.zeros_like(weight)
    for offset, expected in ((0.1, [6.0, 0.5, 0.0]), (-0.6, [4.0, 0.5, 0.0]), (-0.8, [4.0, 0.0, -0.5])):
        moves[0, 1:4] = offset
        assert quantize(weight, scheme, moves.float()).dequantize()[0, 1:4].tolist() == expected
    offset = torch.zeros_like(weight).requires_grad_()
    limits = group_limits(weight, scheme)
    values = QDQ.apply(weight, offset, limits, scheme, torch.float64, None, torch.ones(1, 1, dtype=torch.float64))
    values.backward(torch.ones_like(weight))
    assert offset.grad is not None and offset.grad[0, :4].tolist() == [2.0, 2.0, 0.5, 0.5]


def test_an_offset_of_what_saturates_gets_no_gradient() -> None:
    weight = torch.tensor([[7.9, 6.9, 1.0] + [0.0] * 29], dtype=torch.float64)  # scale 1: 7.9 → 8, beyond 6; 6.9 → 6
    offset = torch.zeros_like(weight).requires_grad_()
    ones = torch.ones(1, 1, dtype=torch.float64)
    values = QDQ.apply(weight, offset, group_limits(weight, FLOATS["MXFP4"]), FLOATS["MXFP4"], torch.float64, None, ones)
    values.backward(torch.ones_like(weight))
    assert values[0, :3].tolist() == [6.0, 6.0, 1.0]
    assert offset.grad is not None and offset.grad[0, :3].tolist() == [0.0, 2.0, 0.5]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Other implementations


GOLDENS = json.loads((Path(__file__).parent / "golden" / "autoround_float_rtn.json").read_text(encoding="utf-8"))["entries"]
GOLDEN_SCHEMES = FLOATS | {
    "W4 g32 sym": scheme(4, 32, True),
    "W4 g32 asym": scheme(4, 32, False),
    "W8 channel sym": scheme(8, -1, True),
    "W2 tensor asym": scheme(2, 0, False),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_rounding_to_nearest_is_auto_rounds(name: str) -> None:
    """Every scale and every value of auto-round 0.16.1 (tools/peers/float_goldens.py), but for the scales of blocks of zeros."""
    label, kind, size = name.rsplit(" ", 2)
    rows, columns = (int(side) for side in size.split("x"))
    scheme = GOLDEN_SCHEMES[label]
    weight = tables.golden_weight(kind, (rows, columns), seed=len(kind) + rows)
    assert tables.fingerprint(weight) == GOLDENS[name]["weight"]
    found = quantize(weight, scheme)
    scale = found.scale.float().flatten()
    empty = group_limits(to_groups(weight, scheme.group_size), scheme)[0].flatten() == 0
    if scheme.dtype.startswith("mx"):
        scale -= 127
        if scheme.dtype == "mx_fp_rceil":
            scale[empty] = 1  # ours is that of magnitude 2
    values = found.dequantize()
    if scheme.dtype == "nv_fp":
        scale[empty] = 0  # ours is the smallest E4M3
        values = element_of(scheme).decode(found.codes)
    assert tables.fingerprint(scale) == GOLDENS[name]["scale"]
    assert tables.fingerprint(values) == GOLDENS[name]["values"]


def peer_arguments(scheme: WeightScheme) -> QuantizationArgs:
    """compressed-tensors' arguments of a weight scheme."""
    fields: dict[str, object] = {"num_bits": scheme.bits, "type": "int" if scheme.dtype == "int" else "float", "symmetric": True}
    if isinstance(scheme.group_size, tuple):
        fields |= {"strategy": "block", "block_structure": list(scheme.group_size)}
    elif scheme.group_size > 0:
        fields |= {"strategy": "tensor_group" if scheme.dtype == "nv_fp" else "group", "group_size": scheme.group_size}
    else:
        fields["strategy"] = "tensor" if scheme.group_size == 0 else "channel"
    if scheme.dtype in ("mx_fp", "nv_fp"):
        kind = torch.uint8 if scheme.dtype == "mx_fp" else torch.float8_e4m3fn
        fields |= {"scale_dtype": kind, "zp_dtype": kind}
    return QuantizationArgs(**fields)


PEER_SCHEMES = {
    name: FLOATS[name] for name in ("FP8 tensor", "FP8 channel", "FP8 128x128", "FP8 16x24", "FP8 g32", "MXFP4", "MXFP8", "NVFP4")
}
PEER_SCHEMES |= {"INT8 channel": scheme(8, -1), "INT8 g32": scheme(8, 32), "INT4 g32": scheme(4, 32)}


@pytest.mark.parametrize("name", PEER_SCHEMES)
@pytest.mark.parametrize("kind", ["normal", "zero rows", "outlier", "huge"])
def test_compressed_tensors_rounds_the_same_with_our_scales(name: str, kind: str) -> None:
    scheme = PEER_SCHEMES[name]
    weight = Case(scheme, (20, 96), kind, "1", 9).weight().float()
    found = quantize(weight, scheme)
    arguments = peer_arguments(scheme)
    scale = found.scale.float() if scheme.dtype == "nv_fp" else found.scales()
    zero = torch.zeros_like(scale)
    assert torch.equal(peer.fake_quantize(weight, scale, zero, arguments, global_scale=found.global_scale), found.dequantize())
    codes = peer.quantize(weight, scale, zero, arguments, global_scale=found.global_scale)
    ours = found.codes.float() - 2 ** (scheme.bits - 1) if scheme.dtype == "int" else element_of(scheme).decode(found.codes)
    assert torch.equal(codes, ours)
    assert torch.equal(peer.dequantize(ours, scale, zero, arguments, global_scale=found.global_scale), found.dequantize())


@pytest.mark.parametrize("name", ["FP8 tensor", "FP8 channel", "FP8 g32", "NVFP4"])
def test_compressed_tensors_has_the_same_scales(name: str) -> None:
    scheme = FLOATS[name]
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(6)) * 0.02
    found = quantize(weight, scheme)
    rows = to_groups(weight, scheme.group_size)
    low, high = rows.amin(-1), rows.amax(-1)
    if scheme.dtype == "nv_fp":
        assert found.global_scale is not None and torch.equal(generate_gparam(weight.min(), weight.max()), found.global_scale)
    scale, _ = calculate_qparams(low, high, peer_arguments(scheme), found.global_scale)
    assert torch.equal(scale, found.scale.float().flatten())


@pytest.mark.parametrize("name", ["MXFP4", "MXFP8"])
def test_compressed_tensors_takes_the_next_power_for_blocks_near_it(name: str) -> None:
    """Its exponent is one higher where the largest is at least 1.75 times its power of two; ours is auto-round's and the standard's."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(6)) * 0.02
    found = quantize(weight, FLOATS[name])
    rows = to_groups(weight, 32)
    scale, _ = calculate_qparams(rows.amin(-1), rows.amax(-1), peer_arguments(FLOATS[name]))
    near = torch.frexp(rows.abs().amax(-1))[0] * 2 >= 1.75
    assert near.any() and torch.equal(scale, found.scales().flatten() * torch.where(near, 2, 1))


def test_codes_of_fp8_are_torchs_bytes() -> None:
    found = quantize(torch.randn(4, 32, generator=torch.Generator().manual_seed(1)), FLOATS["FP8 channel"])
    assert torch.equal(found.codes.view(torch.float8_e4m3fn).float(), E4M3.decode(found.codes))
