"""Schemes and presets."""

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenround.errors import UserError
from evenround.scheme import NOT_YET, PRESETS, ActivationScheme, Scheme, WeightScheme, preset

W4 = PRESETS["W4A16"]
W8 = PRESETS["W8A16"]


def refused(action: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert str(caught.value) == message


# ---------------------------------------------------------------------------------------------------------------------------------------
# Values


def test_a_scheme_is_a_value() -> None:
    assert WeightScheme(bits=4) == WeightScheme(bits=4, group_size=128, symmetric=True)
    assert Scheme(weight=WeightScheme(bits=4)) == W4 and hash(Scheme(weight=WeightScheme(bits=4))) == hash(W4)
    with pytest.raises(FrozenInstanceError):
        W4.weight.bits = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("group_size", "groups", "shape", "label"),
    [(32, 3, (4, 3), "g32"), (128, 1, (4, 1), "g128"), (64, 2, (4, 2), "g64"), (-1, 1, (4, 1), "channel"), (0, 1, (1, 1), "tensor")],
)
def test_groups_along_a_row(group_size: int, groups: int, shape: tuple[int, int], label: str) -> None:
    weight = WeightScheme(bits=3, group_size=group_size, symmetric=False)
    assert weight.groups(96) == groups and weight.scale_shape((4, 96)) == shape
    assert weight.label == Scheme(weight=weight).label == f"W3 {label} asym"


def test_a_ragged_last_group_counts() -> None:
    assert WeightScheme(bits=4, group_size=64).groups(65) == 2
    assert W4.label == "W4 g128 sym"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightScheme(bits=1), "bits 1 (--bits) must be a whole number from 2 to 8"),
        (lambda: WeightScheme(bits=9), "bits 9 (--bits) must be a whole number from 2 to 8"),
        (lambda: WeightScheme(bits=True), "bits True (--bits) must be a whole number from 2 to 8"),
        (lambda: WeightScheme(bits=4.0), "bits 4.0 (--bits) must be a whole number from 2 to 8"),  # type: ignore[arg-type]
        (lambda: WeightScheme(bits="4"), "bits '4' (--bits) must be a whole number from 2 to 8"),  # type: ignore[arg-type]
        (lambda: WeightScheme(bits=4, group_size=32.0), "group_size 32.0 (--group_size) must be a whole number"),  # type: ignore[arg-type]
        (lambda: WeightScheme(bits=4, group_size=False), "group_size False (--group_size) must be a whole number"),
        *(
            (
                lambda size=size: WeightScheme(bits=4, group_size=size),
                f"group_size {size} (--group_size) must be at least 16, or -1 (one scale per output channel), "
                "or 0 (one scale for the tensor)",
            )
            for size in (8, -2)
        ),
        (lambda: WeightScheme(bits=4, symmetric=1), "sym 1 must be true or false"),  # type: ignore[arg-type]
        (
            lambda: WeightScheme(bits=4, dtype="mx_fp"),  # type: ignore[arg-type]
            "data type 'mx_fp' (--data_type) is not supported yet; use 'int'",
        ),
        (
            lambda: ActivationScheme(bits=8),
            "act_bits 8 (--act_bits) is not supported yet; only 16 (activations are left alone)",
        ),
        (
            lambda: Scheme.from_dict({"grop_size": 32}),
            "unknown scheme field 'grop_size'; did you mean 'group_size'? Fields: bits, group_size, sym, data_type, act_bits",
        ),
        (lambda: Scheme.from_dict({"zzz": 1}), "unknown scheme field 'zzz'. Fields: bits, group_size, sym, data_type, act_bits"),
    ],
)
def test_refused_values(make: Callable[[], object], message: str) -> None:
    refused(make, message)


any_scheme = st.builds(
    Scheme,
    weight=st.builds(
        WeightScheme, bits=st.integers(2, 8), group_size=st.one_of(st.sampled_from([-1, 0]), st.integers(16, 2048)), symmetric=st.booleans()
    ),
)


@settings(max_examples=60, deadline=None)
@given(scheme=any_scheme, base=any_scheme)
def test_a_scheme_survives_json(scheme: Scheme, base: Scheme) -> None:
    fields = json.loads(json.dumps(scheme.to_dict()))
    assert Scheme.from_dict(fields) == Scheme.from_dict(fields, base) == scheme
    assert Scheme.from_dict({}, base) == base


def test_fields_go_on_top_of_a_scheme() -> None:
    base = Scheme(weight=WeightScheme(bits=3, group_size=64, symmetric=False))
    assert Scheme.from_dict({"bits": 8}, base).weight == WeightScheme(bits=8, group_size=64, symmetric=False)
    assert Scheme.from_dict({"sym": False}).weight == WeightScheme(bits=4, symmetric=False)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Presets


def test_presets() -> None:
    assert len(PRESETS) == 28
    for bits in range(2, 9):
        assert PRESETS[f"W{bits}A16"].weight == WeightScheme(bits=bits, group_size=128)
        assert PRESETS[f"W{bits}A16G64"].weight == WeightScheme(bits=bits, group_size=64)
        assert PRESETS[f"W{bits}A16G32"].weight == WeightScheme(bits=bits, group_size=32)
        assert PRESETS[f"W{bits}A16_ASYM"].weight == WeightScheme(bits=bits, symmetric=False)
    for name, scheme in PRESETS.items():
        assert preset(name) is preset(name.lower()) is preset(name.replace("_", "-")) is scheme


@pytest.mark.parametrize(("name", "known"), [("w4a16-g32", "W4A16G32"), ("W2A16_g64", "W2A16G64"), ("w3a16_asym", "W3A16_ASYM")])
def test_other_spellings_of_presets(name: str, known: str) -> None:
    assert preset(name) is PRESETS[known]


@pytest.mark.parametrize("name", [*NOT_YET, "mxfp4", "GGUF:Q4_K_M", "fp8-dynamic"])
def test_presets_to_come_are_refused_by_name(name: str) -> None:
    refused(
        lambda: preset(name),
        f"scheme {name!r} (--scheme) is not implemented yet; integer weight-only schemes are: {', '.join(PRESETS)}",
    )


def test_unknown_presets_get_the_nearest_name() -> None:
    every = ", ".join(PRESETS)
    refused(lambda: preset("W4A61"), f"no scheme 'W4A61' (--scheme); did you mean 'W4A16'? Schemes: {every}")
    refused(lambda: preset("four"), f"no scheme 'four' (--scheme). Schemes: {every}")


# ---------------------------------------------------------------------------------------------------------------------------------------
# Rules
