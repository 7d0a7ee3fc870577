"""Integer quantize-dequantize against slow references (`reference.py`): values, codes, gradients; and what holds for every weight."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenround.numerics import integer
from evenround.numerics.integer import QuantizedWeight, from_groups, group_range, parameter_gradients, qdq, quantize, to_groups
from evenround.scheme import WeightScheme
from reference import Array, quantize_by_loops, ranges, straight_through

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# ---------------------------------------------------------------------------------------------------------------------------------------
# Cases


class IntegerQDQ(torch.autograd.Function):
    """`qdq` and `parameter_gradients` as one differentiable function, so that autograd can be asked for gradients."""

    @staticmethod
    def forward(ctx, rows, offset, min_clip, max_clip, low, high, scheme, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, offset, min_clip, max_clip, low, high)
        ctx.scheme = scheme
        return qdq(rows, offset, min_clip, max_clip, low, high, scheme, dtype)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        return None, *parameter_gradients(grads[0], *ctx.saved_tensors, ctx.scheme), None, None, None, None


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
        return len(ranges(*self.shape, self.scheme.group_size))

    def weight(self) -> Tensor:
        """float64 `[out, in]`."""
        return KINDS[self.kind](torch.randn(self.shape, generator=self.generator(0), dtype=torch.float64))

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
    smallest, largest = group_range(rows)
    moved = to_groups(offset, case.scheme.group_size)
    result = IntegerQDQ.apply(rows, moved, column(low), column(high), smallest, largest, case.scheme, dtype)
    return from_groups(result, case.shape)


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
        found = quantize(weight, case.scheme, moved, column(low), column(high))
        pairs = list(zip(low.tolist(), high.tolist(), strict=True))
    else:
        found = quantize(weight, case.scheme)
        pairs = None
    loops = quantize_by_loops(
        array(weight), case.scheme.bits, case.scheme.group_size, case.scheme.symmetric, array(offset) if tuned else None, pairs
    )
    assert found.scale.flatten().tolist() == loops.scales
    assert found.zero_point.flatten().tolist() == loops.zeros
    assert found.codes.tolist() == loops.codes
    assert torch.equal(found.dequantize(), torch.from_numpy(loops.dequantized))


@quick
@given(case=cases)
def test_what_is_exported_is_what_was_tuned(case: Case) -> None:
    """`quantize` gives the very values that `qdq` put into the block, bit for bit, in every compute dtype."""
    weight, offset = case.weight().float(), case.offset().float()
    low, high = (clip.float() for clip in case.clip_pair())
    exported = quantize(weight, case.scheme, to_groups(offset, case.scheme.group_size), column(low), column(high))
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
    assert torch.equal(from_groups(rows, case.shape), weight)
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
        exported = quantize(weight, case.scheme, to_groups(offset, group_size), column(low), column(high))
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(gradients) == 3
        return values.detach(), exported.codes, exported.scale, exported.zero_point, *gradients

    whole = everything()
    for size in (1, 17, 100):
        monkeypatch.setattr(integer, "CHUNK", size)
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
    low, high = group_range(weight)
    clips = torch.ones(2, 1, 1, dtype=torch.float64)
    values = IntegerQDQ.apply(weight, case_offset, clips[0], clips[1], low, high, scheme(), torch.float64)
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
    low, high = group_range(rows)
    ones = torch.ones_like(low)
    values = IntegerQDQ.apply(rows, offset, ones, ones, low, high, case.scheme, torch.float64)
    from_groups(values, case.shape).sum().backward()
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
