"""Small floating point numbers against sorted tables of them (`reference_floats.py`): every code, every tie, both ends."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference_floats as tables
from evenround.numerics.elements import E2M1, E4M3, INT4, Element, element_of
from evenround.scheme import ActivationScheme, WeightScheme

PAIRS = {"E2M1": (E2M1, tables.E2M1), "E4M3": (E4M3, tables.E4M3), "INT4": (INT4, tables.INT4)}
ELEMENTS = pytest.mark.parametrize(("element", "table"), PAIRS.values(), ids=PAIRS)


def all_codes(element: Element, table: tables.Table) -> list[int]:
    """Every code that is a number."""
    return [code + sign for sign in (0, table.sign) for code in range(len(table.numbers))]


def saturated(element: Element, values: Tensor) -> Tensor:
    return element.round(values).clamp(-element.largest, element.largest)


def check(element: Element, table: tables.Table, values: Tensor) -> None:
    """Rounding and codes of float32 `values`, to the sign of zero."""
    codes = [table.nearest(value) for value in values.tolist()]
    rounded = saturated(element, values)
    expected = torch.tensor([table.number(code) for code in codes])
    assert torch.equal(rounded, expected) and torch.equal(rounded.signbit(), expected.signbit())
    assert element.encode(rounded).tolist() == codes
    wide = saturated(element, values.double())
    assert wide.dtype == torch.float64 and torch.equal(wide, expected.double())


@ELEMENTS
def test_the_largest_numbers_and_widths(element: Element, table: tables.Table) -> None:
    assert element.largest == table.largest
    assert element.bits == int(math.log2(table.sign)) + 1
    assert 2.0**element.largest_exponent <= element.largest < 2.0 ** (element.largest_exponent + 1)
    assert 2.0**element.lowest_exponent * 2.0**-element.mantissa_bits == table.numbers[1]


def test_the_numbers_are_those_of_the_standards() -> None:
    assert tables.E2M1.numbers == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert tables.INT4.numbers == (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75)
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = codes.view(torch.float8_e4m3fn).float()
    assert decoded.isnan().nonzero().flatten().tolist() == [127, 255]
    assert all(tables.E4M3.number(code) == float(decoded[code]) for code in range(256) if code % 128 != 127)


@ELEMENTS
def test_every_code_is_decoded_and_found_again(element: Element, table: tables.Table) -> None:
    codes = all_codes(element, table)
    numbers = element.decode(torch.tensor(codes, dtype=torch.uint8))
    expected = torch.tensor([table.number(code) for code in codes])
    assert numbers.dtype == torch.float32
    assert torch.equal(numbers, expected) and torch.equal(numbers.signbit(), expected.signbit())
    encoded = element.encode(numbers)
    assert encoded.dtype == torch.uint8 and encoded.tolist() == codes
    assert torch.equal(element.encode(numbers.double()), encoded)
    assert torch.equal(element.round(numbers), numbers)


@ELEMENTS
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(element: Element, table: tables.Table) -> None:
    numbers = torch.tensor(table.numbers)
    ties = (numbers[1:] + numbers[:-1]) / 2
    around = torch.cat([ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(1e9))])
    check(element, table, torch.cat([around, -around]))
    assert all(code % 2 == 0 for code in element.encode(saturated(element, ties)).tolist())


@ELEMENTS
def test_what_is_beyond_the_largest_becomes_it(element: Element, table: tables.Table) -> None:
    largest = element.largest
    last = table.numbers[-1] - table.numbers[-2]
    beyond = [largest, largest + last * 0.49, largest + last * 0.5, largest + last, largest * 2, largest * 1e6, 3e38, math.inf]
    values = torch.tensor([*beyond, *(-value for value in beyond)])
    check(element, table, values)
    assert set(saturated(element, values).abs().tolist()) == {largest}
    # Before saturation, the grid goes on: this is how gradients know what was clipped.
    assert element.round(torch.tensor([largest + last * 0.49, largest + last * 0.51])).tolist() == [largest, largest + last]


@ELEMENTS
def test_zeros_keep_their_sign_and_nan_stays(element: Element, table: tables.Table) -> None:
    check(element, table, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, table.numbers[1] / 2, -table.numbers[1] / 2]))
    assert element.round(torch.tensor([math.nan])).isnan().all()


@ELEMENTS
def test_random_values_go_to_the_nearest_number(element: Element, table: tables.Table) -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2000, generator=generator)
    check(element, table, torch.cat([normal * size for size in (table.numbers[1], 1.0, element.largest / 2)]))
    powers = torch.randint(-20, 12, (2000,), generator=generator)
    check(element, table, torch.ldexp(normal, powers))


@settings(max_examples=200, deadline=None)
@given(value=st.floats(width=32, allow_nan=False), name=st.sampled_from(sorted(PAIRS)))
def test_any_value_goes_to_the_nearest_number(value: float, name: str) -> None:
    check(*PAIRS[name], torch.tensor([value], dtype=torch.float32))


@ELEMENTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spacing_is_the_gap_of_the_table(element: Element, table: tables.Table, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.cat([torch.tensor(table.numbers), torch.randn(500, generator=generator) * element.largest]).to(dtype)
    values = torch.cat([values, -values, torch.tensor([1e-30, 1e30], dtype=dtype)])
    spacing = element.spacing(values)
    assert spacing.dtype == dtype and spacing.tolist() == [table.gap(value) for value in values.tolist()]


def test_torch_rounds_to_e4m3_as_we_do() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(2)) * 100
    values = torch.cat([values, values * 2.0**-14]).clamp(-448, 448)
    assert torch.equal(values.to(torch.float8_e4m3fn).float(), E4M3.round(values))


def test_data_types_have_their_elements() -> None:
    assert element_of(WeightScheme(bits=8, group_size=-1, dtype="fp")) == E4M3
    assert element_of(WeightScheme(bits=8, group_size=32, dtype="mx_fp")) == E4M3
    assert element_of(WeightScheme(bits=4, group_size=32, dtype="mx_fp")) == E2M1
    assert element_of(ActivationScheme(bits=4, group_size=32, dtype="mx_fp_rceil")) == E2M1
    assert element_of(WeightScheme(bits=4, group_size=16, dtype="nv_fp")) == E2M1
    assert element_of(ActivationScheme(bits=4, group_size=32, dtype="mx_int")) == INT4
