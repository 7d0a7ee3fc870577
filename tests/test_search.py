"""Searched scales against all candidates tried one after another in float64, and against what files can hold."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenround.numerics import search
from evenround.numerics.grouping import to_groups
from evenround.numerics.search import moment_shape, moments, search_limits, searchable
from evenround.numerics.weights import global_scale, group_limits, make_grid, quantize
from evenround.scheme import PER_CHANNEL, PRESETS, WeightScheme
from reference_floats import E2M1, E4M3, INT4, Table

LEAST = float(torch.tensor(1e-5).half())
SCHEMES: dict[str, WeightScheme] = {
    "W2 sym": WeightScheme(bits=2, group_size=32),
    "W4 sym": WeightScheme(bits=4, group_size=16),
    "W4 channel": WeightScheme(bits=4, group_size=PER_CHANNEL),
    "W3 asym": WeightScheme(bits=3, group_size=32, symmetric=False),
    "W4 channel asym": WeightScheme(bits=4, group_size=PER_CHANNEL, symmetric=False),
    "MXFP4": WeightScheme(bits=4, group_size=32, dtype="mx_fp"),
    "MXFP4 rceil": WeightScheme(bits=4, group_size=32, dtype="mx_fp_rceil"),
    "MXFP8": WeightScheme(bits=8, group_size=32, dtype="mx_fp"),
    "MXINT4": WeightScheme(bits=4, group_size=32, dtype="mx_int"),
    "NVFP4": WeightScheme(bits=4, group_size=16, dtype="nv_fp"),
}


# ---------------------------------------------------------------------------------------------------------------------------------------
# The slow way: one group, one candidate after another


def table_of(scheme: WeightScheme) -> Table:
    return INT4 if scheme.dtype == "mx_int" else E2M1 if scheme.bits == 4 else E4M3


def half(value: float) -> float:
    """As float16 holds a scale: its sign kept, at least 1e-5 away from zero."""
    rounded = float(torch.tensor(value, dtype=torch.float32).half())
    return (-1 if rounded < 0 else 1) * max(abs(rounded), LEAST)


def candidates(group: list[float], scheme: WeightScheme, whole: float | None) -> list[tuple[float, int]]:
    """(scale, zero point), the plain one first."""
    low, high = min(0.0, *group), max(0.0, *group)
    if scheme.dtype == "int" and scheme.symmetric:
        plain = half((-low if -low > high else -high) / 2 ** (scheme.bits - 1))
        return [(plain, 0), *((half(plain * sign * (0.8 + 0.0125 * step)), 0) for step in range(37) for sign in (1, -1))]
    if scheme.dtype == "int":
        top = 2**scheme.bits - 1

        def grid(low: float, high: float) -> tuple[float, int]:
            scale = half((high - low) / top)
            return scale, min(max(round(-low / scale), 0), top)

        shares = [1.1 - 0.05 * step for step in range(8)]
        return [grid(low, high), *(grid(low * lower, high * upper) for lower, upper in itertools.product(shares, shares))]
    magnitude = abs(low) if -low > high else high
    if scheme.dtype == "nv_fp":
        assert whole is not None
        plain_code = max(1, E4M3.nearest(min(whole * magnitude / 6, 448.0)))
        return [(E4M3.number(min(max(plain_code + shift, 1), 126)) / whole, 0) for shift in (0, *range(-8, 0), *range(1, 6))]
    exponent = -200.0
    if scheme.dtype == "mx_fp_rceil":
        while (magnitude or 2.0) > table_of(scheme).largest * 2**exponent:
            exponent += 1
    else:
        while 2 ** (exponent + 1) * 2.0 ** int(torch.tensor(table_of(scheme).largest).log2().floor()) <= (magnitude or 2.0):
            exponent += 1
    return [(2.0**power, 0) for power in (exponent, exponent - 1, exponent + 1)]


def error_of(group: list[float], scale: float, zero: int, scheme: WeightScheme, squares: Tensor) -> float:
    """eᵀ M e in float64; squares: `[n, side, side]` along the diagonal of M."""
    found = []
    for value in group:
        ratio = value / scale
        if scheme.dtype != "int":
            found.append(table_of(scheme).number(table_of(scheme).nearest(ratio)) * scale)
        elif scheme.symmetric:
            found.append(min(max(round(ratio), -(2 ** (scheme.bits - 1))), 2 ** (scheme.bits - 1) - 1) * scale)
        else:
            found.append((min(max(round(ratio) + zero, 0), 2**scheme.bits - 1) - zero) * scale)
    errors = (torch.tensor(found, dtype=torch.float64) - torch.tensor(group, dtype=torch.float64)).reshape(len(squares), -1)
    return float(sum(error @ square @ error for error, square in zip(errors, squares, strict=True)))


def damped(seen: Tensor) -> Tensor:
    """A hundredth of the mean of M's diagonal more on it, float64."""
    seen = seen.double()
    mean = seen.diagonal(dim1=1, dim2=2).mean()
    return seen + torch.eye(seen.shape[1], dtype=torch.float64) * (0.01 * mean + 1.1754943508222875e-38)


def check(weight: Tensor, inputs: Tensor, scheme: WeightScheme) -> Tensor:
    """Scales `[groups, 1]` that the search chose, when they are candidates and none of these is better."""
    seen = torch.zeros(moment_shape(scheme, weight.shape[1]))
    moments(inputs, seen)
    own = group_limits(to_groups(weight, scheme.group_size), scheme)
    whole = global_scale(own[0].amax().reshape(1)) if scheme.dtype == "nv_fp" else None
    limits = search_limits(weight, own, scheme, seen, whole)
    assert len(limits) == len(own) and all(
        limit.shape == mine.shape and limit.dtype == mine.dtype for limit, mine in zip(limits, own, strict=True)
    )
    grid = make_grid(limits, (1.0, 1.0), scheme, whole)
    zeros = torch.zeros_like(grid.scale) if isinstance(grid.zero, float) else grid.zero
    squares, groups = damped(seen), scheme.groups(weight.shape[1])
    each = len(squares) // groups
    for number, group in enumerate(to_groups(weight, scheme.group_size).tolist()):
        mine = squares[number % groups * each : (number % groups + 1) * each]
        chosen = (float(grid.scale[number]), int(zeros[number]))
        tried = candidates(group, scheme, None if whole is None else float(whole))
        if scheme.dtype == "nv_fp":  # the division is float32's
            assert min(abs(scale / chosen[0] - 1) for scale, _ in tried) < 1e-6
        else:
            assert chosen in tried
        found = error_of(group, *chosen, scheme, mine)
        errors = [error_of(group, *candidate, scheme, mine) for candidate in dict.fromkeys(tried)]
        assert found <= min(errors) * (1 + 1e-4) + 1e-30, (number, found, min(errors))
        assert found <= errors[0] * (1 + 1e-4) + 1e-30
    stored = quantize(weight, scheme, limits=limits, whole=whole)
    assert torch.equal(stored.scales().reshape(-1, 1), grid.scale)  # what files hold is what was weighed
    if stored.zero_point is not None and not scheme.symmetric:
        assert torch.equal(stored.zero_point.reshape(-1, 1).float(), zeros)
    return grid.scale


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(tokens: int, width: int, seed: int = 1) -> Tensor:
    """Inputs whose channels go together, with some outliers."""
    common, channels = rand(tokens, 1, seed=seed), 1 + 5 * (torch.arange(width) % 11 == 0)
    return (rand(tokens, width, seed=seed + 1) + 2 * common) * channels


@pytest.mark.parametrize("name", SCHEMES)
def test_no_candidate_is_better_than_the_chosen_scale(name: str) -> None:
    scales = check(rand(3, 96), correlated(40, 96), SCHEMES[name])
    assert torch.isfinite(scales).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_a_search_changes_some_scales(name: str) -> None:
    """Else the test above would say nothing."""
    scheme, weight, inputs = SCHEMES[name], rand(16, 96, seed=3), correlated(40, 96)
    seen = torch.zeros(moment_shape(scheme, 96))
    moments(inputs, seen)
    own = group_limits(to_groups(weight, scheme.group_size), scheme)
    whole = global_scale(own[0].amax().reshape(1)) if scheme.dtype == "nv_fp" else None
    found = make_grid(search_limits(weight, own, scheme, seen, whole), (1.0, 1.0), scheme, whole).scale
    assert not torch.equal(found, make_grid(own, (1.0, 1.0), scheme, whole).scale)


@pytest.mark.parametrize("name", ["W2 sym", "W3 asym", "MXFP4", "MXINT4", "NVFP4"])
def test_ragged_groups_are_searched_as_if_zeros_filled_them(name: str) -> None:
    check(rand(3, 72), correlated(30, 72), SCHEMES[name])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("width", "side"), [(192, 96), (131, 1), (256, 128), (300, 100)])
def test_wide_channels_are_weighed_in_squares(width: int, side: int, symmetric: bool) -> None:
    scheme = WeightScheme(bits=3, group_size=PER_CHANNEL, symmetric=symmetric)
    assert moment_shape(scheme, width) == (width // side, side, side)
    check(rand(2, width), correlated(30, width), scheme)


def test_wide_groups_are_weighed_in_squares() -> None:
    scheme = WeightScheme(bits=3, group_size=192)
    assert moment_shape(scheme, 384) == (4, 96, 96)
    check(rand(2, 384), correlated(30, 384), scheme)


@pytest.mark.parametrize("name", SCHEMES)
def test_zero_weights_keep_a_scale_that_files_hold(name: str) -> None:
    weight = rand(3, 64)
    weight[1] = 0
    weight[2, :32] = 0
    check(weight, correlated(20, 64), SCHEMES[name])
    check(torch.zeros(2, 64), correlated(20, 64), SCHEMES[name])


@pytest.mark.parametrize("name", SCHEMES)
def test_inputs_of_zeros_leave_plain_rounding(name: str) -> None:
    """Nothing is known: nothing is better than anything else by more than nothing."""
    scheme, weight = SCHEMES[name], rand(3, 64)
    scales = check(weight, torch.zeros(20, 64), scheme)
    assert torch.isfinite(scales).all() and (scales != 0).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_channels_that_no_text_excites_still_count(name: str) -> None:
    inputs = correlated(20, 64)
    inputs[:, 16:48] = 0
    check(rand(3, 64), inputs, SCHEMES[name])


def test_scales_of_either_sign_are_found_and_come_back() -> None:
    scales = check(rand(24, 32, seed=5), correlated(40, 32), SCHEMES["W2 sym"])
    assert (scales < 0).any() and (scales > 0).any()
    weight = rand(24, 32, seed=5).abs()
    weight[:, 3] = -weight.amax(1) * 1.01  # alone on its side: plain rounding spends the longer half of the codes on it
    own = group_limits(weight, SCHEMES["W2 sym"])
    assert (make_grid(own, (1.0, 1.0), SCHEMES["W2 sym"]).scale > 0).all()
    assert (check(weight, correlated(40, 32), SCHEMES["W2 sym"]) < 0).any()


@pytest.mark.parametrize("name", ["W2 sym", "W4 channel", "W3 asym"])
@pytest.mark.parametrize("size", [1e-7, 3e-5, 1e-4])
def test_scales_at_the_edge_of_float16_are_weighed_as_they_are_stored(name: str, size: float) -> None:
    check(rand(4, 64) * size, correlated(20, 64), SCHEMES[name])


@pytest.mark.parametrize("name", ["MXFP4", "MXINT4", "NVFP4"])
@pytest.mark.parametrize("size", [1e-12, 1e9])
def test_very_small_and_very_large_weights(name: str, size: float) -> None:
    check(rand(2, 64) * size, correlated(20, 64), SCHEMES[name])


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(sorted(SCHEMES)), st.integers(0, 10**6), st.floats(0.01, 10.0), st.integers(17, 80))
def test_no_candidate_is_better_whatever_the_weight(name: str, seed: int, spread: float, width: int) -> None:
    weight = rand(2, width, seed=seed) * torch.exp(spread * rand(2, width, seed=seed + 1).clamp(-2, 2) / 2)
    check(weight / weight.abs().max(), correlated(9, width, seed), SCHEMES[name])


def test_what_is_searchable() -> None:
    names = {name for name, scheme in PRESETS.items() if searchable(scheme.weight)}
    assert {"W4A16", "W2A16_ASYM", "MXFP4", "MXFP8", "MXINT4", "NVFP4", "INT4"} <= names
    assert not names & {"FP8_STATIC", "FP8_DYNAMIC", "FP8_BLOCK", "INT8", "W8A16", "FPW8A16"}
    assert not searchable(WeightScheme(bits=4, group_size=0))


@pytest.mark.parametrize(("width", "size"), [(64, 32), (72, 32), (96, 96), (5, 1)])
def test_moments_add_up_outer_products(width: int, size: int) -> None:
    inputs = rand(7, width)
    seen = torch.zeros(-(-width // size), size, size)
    for part in inputs.split(3):
        moments(part, seen)
    for number, square in enumerate(seen):
        for row, column in itertools.product(range(size), range(size)):
            one, other = number * size + row, number * size + column
            wanted = sum(float(token[one] * token[other]) for token in inputs) if max(one, other) < width else 0.0
            assert float(square[row, column]) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", SCHEMES)
def test_pieces_of_a_weight_are_searched_like_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device takes more at once than the CPU: the result must not tell."""
    scheme, weight = SCHEMES[name], rand(64, 96)
    seen = torch.zeros(moment_shape(scheme, 96))
    moments(correlated(50, 96), seen)
    own = group_limits(to_groups(weight, scheme.group_size), scheme)
    whole = global_scale(own[0].amax().reshape(1)) if scheme.dtype == "nv_fp" else None
    at_once = search_limits(weight, own, scheme, seen, whole)
    monkeypatch.setattr(search, "PIECE", 7 * 96)
    in_pieces = search_limits(weight, own, scheme, seen, whole)
    assert all(torch.equal(one, other) for one, other in zip(at_once, in_pieces, strict=True))


def test_second_moments_see_what_their_diagonal_does_not() -> None:
    """The output's error on the inputs themselves is smaller than under the plain scale."""
    scheme, weight, inputs = SCHEMES["W2 sym"], rand(64, 96), correlated(200, 96)
    seen = torch.zeros(3, 32, 32)
    moments(inputs, seen)
    limits = search_limits(weight, group_limits(to_groups(weight, 32), scheme), scheme, seen)
    errors = []
    for found in (quantize(weight, scheme), quantize(weight, scheme, limits=limits)):
        error = to_groups(found.dequantize() - weight, 32).reshape(64, 3, 32)
        errors.append(float(sum((inputs[:, at * 32 : at * 32 + 32] @ error[:, at].t()).square().sum() for at in range(3))))
    assert errors[1] < 0.9 * errors[0]
