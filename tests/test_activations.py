"""Fake quantization of activations against tables (`reference_floats.py`) and against compressed-tensors' dynamic quantization."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as peer_fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference_floats as tables
from evenround.numerics import grouping
from evenround.numerics.activations import fake_quantize, input_scale
from evenround.scheme import ActivationScheme
from reference_floats import single

quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SCHEMES = {
    "fp token": ActivationScheme(bits=8),
    "fp group": ActivationScheme(bits=8, group_size=24),
    "fp tensor": ActivationScheme(bits=8, group_size=0),
    "fp static": ActivationScheme(bits=8, group_size=0, dynamic=False),
    "int8 token": ActivationScheme(bits=8, dtype="int"),
    "int4 token": ActivationScheme(bits=4, dtype="int"),
    "int8 token asym": ActivationScheme(bits=8, symmetric=False, dtype="int"),
    "int4 token asym": ActivationScheme(bits=4, symmetric=False, dtype="int"),
    "int8 group": ActivationScheme(bits=8, group_size=24, dtype="int"),
    "int4 group asym": ActivationScheme(bits=4, group_size=24, symmetric=False, dtype="int"),
    "int8 tensor": ActivationScheme(bits=8, group_size=0, dtype="int"),
    "int8 tensor asym": ActivationScheme(bits=8, group_size=0, symmetric=False, dtype="int"),
    "int8 static": ActivationScheme(bits=8, group_size=0, dtype="int", dynamic=False),
    "mx_fp4": ActivationScheme(bits=4, group_size=32, dtype="mx_fp"),
    "mx_fp8": ActivationScheme(bits=8, group_size=32, dtype="mx_fp"),
    "mx_fp4 rceil": ActivationScheme(bits=4, group_size=32, dtype="mx_fp_rceil"),
    "mx_fp8 rceil": ActivationScheme(bits=8, group_size=32, dtype="mx_fp_rceil"),
    "mx_int4": ActivationScheme(bits=4, group_size=32, dtype="mx_int"),
    "nv_fp4": ActivationScheme(bits=4, group_size=16, dtype="nv_fp"),
}
EACH = pytest.mark.parametrize("name", SCHEMES)
BY_TENSOR = ("fp tensor", "int8 tensor", "int8 tensor asym")

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda values: values,
    "shifted": lambda values: values + 3,
    "negative": lambda values: -values.abs(),
    "zeros": lambda values: values * 0,
    "zero tokens": lambda values: values * (torch.arange(len(values)) % 2).unsqueeze(-1),
    "outliers": lambda values: values.abs().pow(9) * values.sign(),
    "tiny": lambda values: values * 1e-6,
    "subnormal": lambda values: values * 1e-40,
    "huge": lambda values: values * 5000,
    "few values": lambda values: values.round() * 0.5,
}


@dataclass(frozen=True)
class Case:
    """Values `[tokens, in]` drawn from `seed`."""

    name: str
    shape: tuple[int, int]
    kind: str
    seed: int

    @property
    def scheme(self) -> ActivationScheme:
        return SCHEMES[self.name]

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        drawn = torch.randn(self.shape, generator=torch.Generator().manual_seed(self.seed))
        return KINDS[self.kind](drawn).to(dtype)

    def scale(self) -> Tensor | None:
        """As if calibration had seen two thirds of the largest value."""
        return scale_for(self.scheme, self.values() / 1.5)


def scale_for(scheme: ActivationScheme, seen: Tensor) -> Tensor | None:
    return input_scale(seen.abs().max(), scheme) if scheme.calibrated else None


cases = st.builds(
    Case,
    name=st.sampled_from(sorted(SCHEMES)),
    shape=st.tuples(st.sampled_from([1, 2, 5]), st.sampled_from([1, 16, 32, 40, 96])),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 10**6),
)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Slow reference


def quantize_by_tables(values: Tensor, scheme: ActivationScheme, scale: float | None) -> Tensor:
    """float32 `[tokens, in]`, one group after another."""
    result = torch.zeros_like(values)
    for rows, columns in tables.tiles(*values.shape, scheme.group_size):
        part = values[rows, columns]
        numbers = (
            integers(part.flatten().tolist(), scheme, scale) if scheme.dtype == "int" else floats(part.flatten().tolist(), scheme, scale)
        )
        result[rows, columns] = torch.tensor(numbers, dtype=torch.float32).reshape(part.shape)
    return result


def integers(values: list[float], scheme: ActivationScheme, scale: float | None) -> list[float]:
    lowest, highest = -(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1) - 1
    low, high, zero = min(0.0, *values), max(0.0, *values), 0
    if not scheme.symmetric:
        scale = single(single(high - low) / (highest - lowest)) or 2.0**-23
        zero = round(max(lowest, min(highest, single(lowest - single(low / scale)))))
    elif scheme.dynamic:
        scale = single(max(high, -low) / ((highest - lowest) / 2)) or 2.0**-23
    assert scale is not None
    result = []
    for value in values:
        code = max(lowest, min(highest, single(single(value / scale) + zero)))
        result.append(single((round(code) - zero) * scale))  # Python rounds halves to even
    return result


def floats(values: list[float], scheme: ActivationScheme, scale: float | None) -> list[float]:
    table, magnitude = tables.table_of(scheme.dtype, scheme.bits), max(abs(value) for value in values)
    if scheme.dtype == "nv_fp":
        assert scale is not None
        scale = single(tables.E4M3.number(tables.nv_block_code(magnitude, scale)) / scale)
    elif scheme.dtype == "fp":
        scale = tables.fp8_scale(magnitude) if scheme.dynamic else scale
    else:
        scale = 2.0 ** tables.mx_exponent(magnitude, table, scheme.dtype.endswith("rceil"))
    assert scale is not None
    return [single(table.number(table.nearest(single(value / scale))) * scale) for value in values]


@quick
@given(case=cases, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_values_equal_the_tables(case: Case, dtype: torch.dtype) -> None:
    values, scale = case.values(dtype).nan_to_num(posinf=6e4, neginf=-6e4), case.scale()
    found = fake_quantize(values, case.scheme, scale)
    expected = quantize_by_tables(values.float(), case.scheme, None if scale is None else scale.item())
    assert found.dtype == dtype and found.shape == values.shape
    assert torch.equal(found, expected.to(dtype))


@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_every_scheme_and_kind_of_values(name: str, kind: str) -> None:
    case = Case(name, (6, 80), kind, 1)
    scale = case.scale()
    found = fake_quantize(case.values(), case.scheme, scale)
    assert torch.equal(found, quantize_by_tables(case.values(), case.scheme, None if scale is None else scale.item()))
    if kind == "zeros":
        assert not found.any()


def test_halves_go_to_the_even_code_after_the_zero_point_is_added() -> None:
    """Scale 1, zero point 5 - 8: 0.5 is code -2.5, which becomes -2; 1.5 is -1.5, which becomes -2 too."""
    values = torch.tensor([[-5.0, 10.0, 0.5, 1.5]])
    found = fake_quantize(values, ActivationScheme(bits=4, symmetric=False, dtype="int"), None)
    assert found.tolist() == [[-5.0, 10.0, 1.0, 1.0]]


def test_the_largest_positive_integer_is_clipped_by_half_a_step() -> None:
    found = fake_quantize(torch.tensor([[127.5, -127.5, 1.0]]), SCHEMES["int8 token"], None)
    assert found.tolist() == [[127.0, -128.0, 1.0]]


def test_static_scales_clip_what_calibration_has_not_seen() -> None:
    values = torch.tensor([[1.0, 2.0, -3.0]])
    for name, expected in (("fp static", [1.0, 1.0, -1.0]), ("int8 static", [127 / 127.5, 127 / 127.5, -128 / 127.5])):
        found = fake_quantize(values, SCHEMES[name], input_scale(torch.tensor(1.0), SCHEMES[name]))
        assert found[0].tolist() == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Scales of calibration


def test_scales_of_calibration() -> None:
    magnitude = torch.tensor(12.0)
    assert input_scale(magnitude, SCHEMES["fp static"]).tolist() == [single(12 / 448)]
    assert input_scale(magnitude, SCHEMES["int8 static"]).tolist() == [single(12 / 127.5)]
    assert input_scale(magnitude, SCHEMES["nv_fp4"]).tolist() == [tables.nv_global(12.0)]
    for name in ("fp static", "int8 static", "nv_fp4"):
        for kind in (torch.tensor(12.0), torch.tensor([12.0]), torch.tensor([[12.0]]), torch.tensor(12.0, dtype=torch.bfloat16)):
            scale = input_scale(kind, SCHEMES[name])
            assert scale.dtype == torch.float32 and scale.shape == (1,)
            assert torch.equal(scale, input_scale(magnitude, SCHEMES[name]))


def test_scales_of_inputs_that_are_all_zero() -> None:
    zero = torch.zeros(1)
    assert input_scale(zero, SCHEMES["fp static"]).tolist() == [single(1 / (448 * 512))]
    assert input_scale(zero, SCHEMES["int8 static"]).tolist() == [2.0**-23]
    assert input_scale(zero, SCHEMES["nv_fp4"]).tolist() == [1.0]


# ---------------------------------------------------------------------------------------------------------------------------------------
# What holds for all


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_unchanged_and_nothing_is_kept(name: str, dtype: torch.dtype) -> None:
    values = Case(name, (3, 40), "outliers", 2).values(dtype).requires_grad_()
    found = fake_quantize(values, SCHEMES[name], scale_for(SCHEMES[name], values.detach() / 4))
    assert found.grad_fn is not None and found.grad_fn.saved_tensors == ()
    upstream = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)).to(dtype)
    found.backward(upstream)
    assert values.grad is not None and torch.equal(values.grad, upstream)


@EACH
def test_the_input_is_left_alone(name: str) -> None:
    values = Case(name, (3, 40), "normal", 2).values()
    before = values.clone()
    found = fake_quantize(values, SCHEMES[name], scale_for(SCHEMES[name], values))
    assert torch.equal(values, before) and found.data_ptr() != values.data_ptr()
    assert not fake_quantize(values, SCHEMES[name], scale_for(SCHEMES[name], values)).requires_grad


@EACH
@pytest.mark.parametrize("shape", [(40,), (2, 3, 40), (2, 1, 3, 40), (0, 40), (2, 0, 40), (3, 0)])
def test_any_shape_is_tokens_times_in(name: str, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    scale = input_scale(torch.tensor(2.0), SCHEMES[name]) if SCHEMES[name].calibrated else None
    found = fake_quantize(values, SCHEMES[name], scale)
    assert found.shape == values.shape
    if values.numel():
        assert torch.equal(found.reshape(-1, 40), fake_quantize(values.reshape(-1, 40), SCHEMES[name], scale))


@EACH
def test_values_that_are_not_contiguous(name: str) -> None:
    values = torch.randn(40, 6, generator=torch.Generator().manual_seed(5)).t()
    scale = scale_for(SCHEMES[name], values)
    assert torch.equal(fake_quantize(values, SCHEMES[name], scale), fake_quantize(values.contiguous(), SCHEMES[name], scale))


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in BY_TENSOR])
def test_tokens_do_not_know_of_each_other(name: str) -> None:
    values = Case(name, (5, 80), "outliers", 6).values()
    scale = scale_for(SCHEMES[name], values)
    whole = fake_quantize(values, SCHEMES[name], scale)
    for number in range(5):
        assert torch.equal(whole[number], fake_quantize(values[number], SCHEMES[name], scale))


@EACH
def test_the_size_of_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    values = Case(name, (7, 80), "outliers", 7).values()
    scale = scale_for(SCHEMES[name], values)
    whole = fake_quantize(values, SCHEMES[name], scale)
    for size in (1, 100, 200):
        monkeypatch.setattr(grouping, "CHUNK", size)
        assert torch.equal(fake_quantize(values, SCHEMES[name], scale), whole)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_nan(name: str, dtype: torch.dtype) -> None:
    values = Case(name, (4, 80), "normal", 8).values(dtype)
    scale = scale_for(SCHEMES[name], values)
    values[1, 5] = math.nan
    found = fake_quantize(values, SCHEMES[name], scale)
    assert found[1, 5].isnan()
    assert name in BY_TENSOR or found[[0, 2, 3]].isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------------------------
# compressed-tensors


def peer_arguments(scheme: ActivationScheme) -> QuantizationArgs:
    fields: dict[str, object] = {
        "num_bits": scheme.bits,
        "type": "int" if scheme.dtype == "int" else "float",
        "symmetric": scheme.symmetric,
        "dynamic": "local" if scheme.dtype == "nv_fp" else scheme.dynamic,
        "strategy": {-1: "token", 0: "tensor"}.get(scheme.group_size, "tensor_group" if scheme.dtype == "nv_fp" else "group"),
    }
    if scheme.group_size > 0:
        fields["group_size"] = scheme.group_size
    if scheme.dtype in ("mx_fp", "nv_fp"):
        kind = torch.uint8 if scheme.dtype == "mx_fp" else torch.float8_e4m3fn
        fields |= {"scale_dtype": kind, "zp_dtype": kind}
    return QuantizationArgs(**fields)


def peer_quantized(values: Tensor, scheme: ActivationScheme, whole: Tensor | None) -> Tensor:
    arguments = peer_arguments(scheme)
    scale, zero = compute_dynamic_scales_and_zp(values, arguments, torch.nn.Identity(), whole)
    return peer_fake_quantize(values, scale, zero, arguments, whole)


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].dtype in ("fp", "int", "nv_fp") and SCHEMES[name].dynamic])
@pytest.mark.parametrize("kind", ["normal", "shifted", "negative", "zeros", "outliers", "huge"])
def test_dynamic_quantization_is_compressed_tensors(name: str, kind: str) -> None:
    case = Case(name, (12, 96), kind, 9)
    values = case.values().reshape(3, 4, 96)
    whole = scale_for(case.scheme, values)
    if whole is not None and kind != "zeros":
        assert torch.equal(whole, generate_gparam(values.min(), values.max()))
    assert torch.equal(fake_quantize(values, case.scheme, whole), peer_quantized(values, case.scheme, whole))


@pytest.mark.parametrize("name", ["fp static", "int8 static"])
def test_static_quantization_is_compressed_tensors(name: str) -> None:
    values = Case(name, (12, 96), "shifted", 10).values()
    arguments = peer_arguments(SCHEMES[name])
    scale, zero = calculate_qparams(values.min(), values.max(), arguments)
    assert torch.equal(scale, input_scale(values.abs().max(), SCHEMES[name]))
    beyond = values * 1.5
    assert torch.equal(fake_quantize(beyond, SCHEMES[name], scale), peer_fake_quantize(beyond, scale, zero, arguments))


@pytest.mark.parametrize("name", ["mx_fp4", "mx_fp8"])
def test_mx_is_compressed_tensors_but_for_blocks_near_the_next_power(name: str) -> None:
    """It rounds exponents up from 1.75 times a power of two; the standard, auto-round and we always down."""
    values = Case(name, (12, 96), "normal", 11).values().reshape(3, 4, 96)
    found = fake_quantize(values, SCHEMES[name], None).reshape(-1, 32)
    expected = peer_quantized(values, SCHEMES[name], None).reshape(-1, 32)
    near = torch.frexp(values.reshape(-1, 32).abs().amax(-1))[0] * 2 >= 1.75
    assert 0 < int(near.sum()) < len(near)
    assert torch.equal(found[~near], expected[~near])
    assert not torch.equal(found[near], expected[near])
