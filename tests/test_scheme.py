"""Schemes and presets."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenround.errors import UserError
from evenround.scheme import (
    ACT_FLAGS,
    ALIASES,
    BITS_OF,
    FIELDS,
    FLOAT_NAMES,
    GROUP_OF,
    NOT_YET,
    PRESETS,
    ActivationScheme,
    Scheme,
    WeightScheme,
    preset,
)

W4 = PRESETS["W4A16"]
W8 = PRESETS["W8A16"]
TYPES = "int, fp, mx_fp, mx_fp_rceil, mx_int, nv_fp"
EVERY_FIELD = "bits, group_size, sym, data_type, act_bits, act_group_size, act_sym, act_data_type, act_dynamic"


def refused(action: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert str(caught.value) == message


# ---------------------------------------------------------------------------------------------------------------------------------------
# Values


def test_a_scheme_is_a_value() -> None:
    assert WeightScheme(bits=4) == WeightScheme(bits=4, group_size=128, symmetric=True, dtype="int")
    assert Scheme(weight=WeightScheme(bits=4)) == W4 and hash(Scheme(weight=WeightScheme(bits=4))) == hash(W4)
    assert {PRESETS["FP8_BLOCK"], PRESETS["NVFP4"], PRESETS["INT8"], PRESETS["INT8_W8A8"]} == {
        preset("FP8-BLOCK"),
        preset("nvfp4"),
        preset("int8"),
    }
    with pytest.raises(FrozenInstanceError):
        W4.weight.bits = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        W4.activation.bits = 8  # type: ignore[misc]


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


def test_tiles() -> None:
    weight = WeightScheme(bits=8, group_size=(128, 64), dtype="fp")
    assert weight.groups(128) == 2 and weight.scale_shape((256, 128)) == (2, 2)
    assert weight.groups(65) == 2 and weight.scale_shape((129, 65)) == (2, 2), "cut at the edges"


@pytest.mark.parametrize(
    ("name", "shape", "bits"),
    [
        ("W4A16", (4, 256), 4 * 1024 + 16 * 8),  # 2 groups a row
        ("W4A16", (4, 192), 4 * 768 + 16 * 8),  # the second is short
        ("W3A16_ASYM", (2, 128), 3 * 256 + (16 + 3) * 2),
        ("INT8", (4, 64), 8 * 256 + 16 * 4),
        ("MXFP4", (4, 64), 4 * 256 + 8 * 8),
        ("MXFP8_RCEIL", (4, 64), 8 * 256 + 8 * 8),
        ("MXINT4", (1, 32), 4 * 32 + 8),
        ("NVFP4", (4, 64), 4 * 256 + 8 * 16 + 32),
        ("FPW8A16", (4, 64), 8 * 256 + 32),
        ("FP8_DYNAMIC", (4, 64), 8 * 256 + 32 * 4),
        ("FP8_BLOCK", (256, 128), 8 * 32768 + 32 * 2),
        ("FP8_BLOCK", (130, 129), 8 * 16770 + 32 * 4),
    ],
)
def test_stored_bits(name: str, shape: tuple[int, int], bits: int) -> None:
    assert PRESETS[name].weight.stored_bits(shape) == bits


def test_stored_bits_of_one_scale_for_the_tensor() -> None:
    assert WeightScheme(bits=4, group_size=0, symmetric=False).stored_bits((4, 64)) == 4 * 256 + 16 + 4


@pytest.mark.parametrize(
    ("scheme", "label"),
    [
        (W4, "W4 g128 sym"),
        (PRESETS["W2A16_ASYM"], "W2 g128 asym"),
        (PRESETS["INT8"], "W8 channel sym A8 int token"),
        (PRESETS["MXFP4"], "MXFP4 A4 mx_fp"),
        (PRESETS["MXFP8_RCEIL"], "MXFP8 A8 mx_fp_rceil"),
        (PRESETS["MXFP4A16"], "MXFP4"),
        (PRESETS["MXINT4"], "MXINT4 A4 mx_int"),
        (PRESETS["NVFP4"], "NVFP4 A4 nv_fp"),
        (PRESETS["FPW8A16"], "FP8 tensor"),
        (PRESETS["FP8_STATIC"], "FP8 channel A8 fp tensor static"),
        (PRESETS["FP8_DYNAMIC"], "FP8 channel A8 fp token"),
        (PRESETS["FP8_BLOCK"], "FP8 128x128 A8 fp g128"),
        (Scheme(weight=WeightScheme(bits=4, group_size=32, dtype="mx_fp_rceil")), "MXFP4 rceil"),
        (Scheme(weight=WeightScheme(bits=8, group_size=-1), activation=ActivationScheme(bits=8, dtype="int", symmetric=False)),
         "W8 channel sym A8 int token asym"),
    ],
)  # fmt: skip
def test_labels(scheme: Scheme, label: str) -> None:
    assert scheme.label == label


def test_schemes_that_differ_have_labels_that_differ() -> None:
    schemes = set(PRESETS.values())
    assert len({scheme.label for scheme in schemes}) == len(schemes) == len(PRESETS) - 1, "INT8_W8A8 is INT8"


@pytest.mark.parametrize(
    ("name", "quantized", "calibrated"),
    [
        ("W4A16", False, False),
        ("NVFP4A16", False, False),
        ("INT8", True, False),
        ("MXFP4", True, False),
        ("FP8_BLOCK", True, False),
        ("FP8_STATIC", True, True),
        ("NVFP4", True, True),
    ],
)
def test_which_activations_need_calibration(name: str, quantized: bool, calibrated: bool) -> None:
    activation = PRESETS[name].activation
    assert (activation.quantized, activation.calibrated) == (quantized, calibrated)


# ---------------------------------------------------------------------------------------------------------------------------------------
# What is refused

STATIC = "static activations (--disable_act_dynamic) have one symmetric scale: --act_group_size 0, no --act_asym"
SIXTEEN = "act_bits 16 (--act_bits) leaves activations alone: give 8 or 4 bits, or leave the other --act_ flags out"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"bits": bits}, f"bits {bits!r} (--bits) must be a whole number from 2 to 8") for bits in (1, 9, 16, True, 4.0, "4", None)),
        ({"bits": 4, "dtype": "fp"}, "bits 4 (--bits) must be 8 for data type 'fp'"),
        ({"bits": 6, "dtype": "mx_fp"}, "bits 6 (--bits) must be 4 or 8 for data type 'mx_fp'"),
        ({"bits": 6, "dtype": "mx_fp_rceil"}, "bits 6 (--bits) must be 4 or 8 for data type 'mx_fp_rceil'"),
        ({"bits": 8, "dtype": "mx_int"}, "bits 8 (--bits) must be 4 for data type 'mx_int'"),
        ({"bits": 8, "dtype": "nv_fp"}, "bits 8 (--bits) must be 4 for data type 'nv_fp'"),
        ({"bits": 4, "dtype": "mxfpp"}, f"data type 'mxfpp' (--data_type) is not known; did you mean 'mx_fp'? Types: {TYPES}"),
        ({"bits": 4, "dtype": "bfloat"}, f"data type 'bfloat' (--data_type) is not known. Types: {TYPES}"),
        ({"bits": 4, "dtype": ["fp"]}, f"data type ['fp'] (--data_type) is not known; did you mean 'fp'? Types: {TYPES}"),
        *(
            ({"bits": 4, "group_size": size}, f"group_size {size!r} (--group_size) must be a whole number")
            for size in (32.0, False, "32", None)
        ),
        *(
            ({"bits": 4, "group_size": size},
             f"group_size {size} (--group_size) must be at least 16, or -1 (one scale per output channel), or 0 (one scale for the tensor)")
            for size in (8, 15, -2)
        ),
        ({"bits": 4, "dtype": "mx_fp"}, "group_size 128 (--group_size): data type 'mx_fp' has groups of 32 only"),
        ({"bits": 4, "dtype": "mx_int", "group_size": -1}, "group_size -1 (--group_size): data type 'mx_int' has groups of 32 only"),
        ({"bits": 4, "dtype": "nv_fp", "group_size": 32}, "group_size 32 (--group_size): data type 'nv_fp' has groups of 16 only"),
        ({"bits": 8, "group_size": (128, 128)}, "group_size (128, 128) (--group_size): only data type 'fp' has tiles; give one number"),
        *(
            ({"bits": 8, "dtype": "fp", "group_size": size},
             f"group_size {size} (--group_size): a tile is two whole numbers of at least 16, such as 128,128")
            for size in ((128,), (128, 128, 128), (128, 8), (128, True), (128, 128.0), ())
        ),
        ({"bits": 4, "symmetric": 1}, "sym 1 must be true or false"),
        ({"bits": 4, "symmetric": None}, "sym None must be true or false"),
        ({"bits": 8, "dtype": "fp", "symmetric": False}, "data type 'fp' has no zero points; leave --asym out"),
    ],
)  # fmt: skip
def test_refused_weights(fields: dict[str, object], message: str) -> None:
    refused(lambda: WeightScheme(**fields), message)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *((fields, SIXTEEN) for fields in ({"group_size": 0}, {"symmetric": False}, {"dtype": "int"}, {"dynamic": False})),
        *(
            ({"bits": bits, "dtype": "int"}, f"act_bits {bits!r} (--act_bits) must be a whole number from 2 to 8")
            for bits in (1, 9, True, 8.0, "8")
        ),
        ({"bits": 4}, "act_bits 4 (--act_bits) must be 8 for data type 'fp'"),
        ({"bits": 6, "dtype": "mx_fp"}, "act_bits 6 (--act_bits) must be 4 or 8 for data type 'mx_fp'"),
        ({"bits": 8, "dtype": "itn"}, f"activation data type 'itn' (--act_data_type) is not known; did you mean 'int'? Types: {TYPES}"),
        ({"bits": 8, "dtype": "bfloat"}, f"activation data type 'bfloat' (--act_data_type) is not known. Types: {TYPES}"),
        *(
            ({"bits": 8, "group_size": size},
             f"act_group_size {size!r} (--act_group_size) must be -1 (per token), 0 (per tensor), or the size of a group")
            for size in (-2, 32.0, True, "32", (128, 128))
        ),
        ({"bits": 8, "dtype": "mx_fp"}, "act_group_size -1 (--act_group_size): data type 'mx_fp' has groups of 32 only"),
        ({"bits": 4, "dtype": "nv_fp", "group_size": 32}, "act_group_size 32 (--act_group_size): data type 'nv_fp' has groups of 16 only"),
        ({"bits": 8, "symmetric": 0}, "act_sym 0 and act_dynamic True must be true or false"),
        ({"bits": 8, "dynamic": 1}, "act_sym True and act_dynamic 1 must be true or false"),
        ({"bits": 8, "symmetric": False}, "activation data type 'fp' has no zero points; leave --act_asym out"),
        ({"bits": 8, "dynamic": False}, STATIC),
        ({"bits": 8, "dynamic": False, "group_size": 128}, STATIC),
        ({"bits": 8, "dynamic": False, "group_size": 0, "dtype": "int", "symmetric": False}, STATIC),
        *(
            ({"bits": 4, "dtype": dtype, "group_size": size, "dynamic": False},
             f"activation data type '{dtype}' takes scales from the values; leave --disable_act_dynamic out")
            for dtype, size in (("mx_fp", 32), ("mx_fp_rceil", 0), ("mx_int", 32), ("nv_fp", 16))
        ),
    ],
)  # fmt: skip
def test_refused_activations(fields: dict[str, object], message: str) -> None:
    refused(lambda: ActivationScheme(**fields), message)  # type: ignore[arg-type]


NOTHING = "would change nothing: activations are not quantized; add act_bits 8 or 4 (--act_bits)"


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        ("W4A16", {"grop_size": 32}, f"unknown scheme field 'grop_size'; did you mean 'group_size'? Fields: {EVERY_FIELD}"),
        ("W4A16", {"zzz": 1}, f"unknown scheme field 'zzz'. Fields: {EVERY_FIELD}"),
        ("W4A16", {"act_group_size": 32}, f"act_group_size 32 (--act_group_size) {NOTHING}"),
        ("W4A16", {"act_sym": False}, f"act_sym False (--act_asym) {NOTHING}"),
        ("MXFP4A16", {"act_data_type": "mx_fp8"}, f"act_data_type mx_fp (--act_data_type) {NOTHING}"),
        (
            "FPW8A16",
            {"act_dynamic": False, "act_data_type": "int"},
            f"act_data_type int (--act_data_type), act_dynamic False (--disable_act_dynamic) {NOTHING}",
        ),
        ("W4A16", {"data_type": "mx_fp8", "bits": 4}, "bits 4 (--bits) is not what data type 'mx_fp8' (--data_type) has; leave one out"),
        (
            "MXFP8",
            {"data_type": "MX_FP4e2m1", "bits": 8},
            "bits 8 (--bits) is not what data type 'mx_fp4e2m1' (--data_type) has; leave one out",
        ),
        (
            "W4A16",
            {"act_bits": 8, "act_data_type": "mx_fp4"},
            "act_bits 8 (--act_bits) is not what data type 'mx_fp4' (--act_data_type) has; leave one out",
        ),
        ("W2A16", {"data_type": "mx_fp"}, "bits 2 (--bits) must be 4 or 8 for data type 'mx_fp'"),
        ("NVFP4", {"bits": 8}, "bits 8 (--bits) must be 4 for data type 'nv_fp'"),
        ("NVFP4", {"group_size": 32}, "group_size 32 (--group_size): data type 'nv_fp' has groups of 16 only"),
        ("MXFP4", {"sym": False}, "data type 'mx_fp' has no zero points; leave --asym out"),
        ("MXFP4", {"act_dynamic": False}, "activation data type 'mx_fp' takes scales from the values; leave --disable_act_dynamic out"),
        ("INT8", {"act_dynamic": False}, STATIC),
        ("FP8_STATIC", {"act_group_size": -1}, STATIC),
        (
            "W4A16",
            {"act_bits": 8, "act_data_type": "float"},
            f"activation data type 'float' (--act_data_type) is not known. Types: {TYPES}",
        ),
        ("W4A16", {"group_size": "128,12"}, "group_size (128, 12) (--group_size): only data type 'fp' has tiles; give one number"),
        ("W4A16", {"group_size": "64"}, "group_size '64' (--group_size) must be a whole number"),
        ("FP8_BLOCK", {"group_size": "128,x"}, "group_size '128,x' (--group_size) must be a whole number"),
        (
            "FP8_BLOCK",
            {"group_size": [128, [1]]},
            "group_size (128, [1]) (--group_size): a tile is two whole numbers of at least 16, such as 128,128",
        ),
        ("W4A16", {"data_type": {"a": 1}}, f"data type {{'a': 1}} (--data_type) is not known. Types: {TYPES}"),
    ],
)  # fmt: skip
def test_refused_fields(base: str, fields: dict[str, object], message: str) -> None:
    refused(lambda: Scheme.from_dict(fields, PRESETS[base]), message)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Fields

sizes = st.one_of(st.sampled_from([-1, 0]), st.integers(16, 2048))


@st.composite
def weights(draw: st.DrawFn) -> WeightScheme:
    dtype = draw(st.sampled_from(sorted(BITS_OF)))
    bits = draw(st.sampled_from(BITS_OF[dtype]))
    tiles = st.tuples(st.integers(16, 512), st.integers(16, 512))
    size = GROUP_OF.get(dtype) or draw(st.one_of(sizes, tiles) if dtype == "fp" else sizes)
    return WeightScheme(bits=bits, group_size=size, symmetric=draw(st.booleans()) if dtype == "int" else True, dtype=dtype)  # type: ignore[arg-type]


@st.composite
def activations(draw: st.DrawFn) -> ActivationScheme:
    dtype = draw(st.sampled_from([None, *sorted(BITS_OF)]))
    if dtype is None:
        return ActivationScheme()
    bits = draw(st.sampled_from(BITS_OF[dtype]))
    if dtype in GROUP_OF:
        return ActivationScheme(bits=bits, group_size=GROUP_OF[dtype], dtype=dtype)  # type: ignore[arg-type]
    if draw(st.booleans()):
        return ActivationScheme(bits=bits, group_size=0, dtype=dtype, dynamic=False)  # type: ignore[arg-type]
    size = draw(st.integers(-1, 2048))
    return ActivationScheme(bits=bits, group_size=size, dtype=dtype, symmetric=draw(st.booleans()) if dtype == "int" else True)  # type: ignore[arg-type]


schemes = st.builds(Scheme, weight=weights(), activation=activations())


@settings(max_examples=200, deadline=None)
@given(scheme=schemes, base=schemes)
def test_a_scheme_survives_json_on_top_of_any_other(scheme: Scheme, base: Scheme) -> None:
    fields = json.loads(json.dumps(scheme.to_dict()))
    assert set(fields) <= set(FIELDS)
    assert Scheme.from_dict(fields) == Scheme.from_dict(fields, base) == scheme
    assert Scheme.from_dict({}, base) == base
    assert scheme.activation.quantized or set(fields) == {"bits", "group_size", "sym", "data_type", "act_bits"}


@settings(max_examples=100, deadline=None)
@given(base=schemes, dtype=st.sampled_from(sorted(BITS_OF)))
def test_another_data_type_of_the_same_width_fits_any_scheme(base: Scheme, dtype: str) -> None:
    bits = base.weight.bits if base.weight.bits in BITS_OF[dtype] else BITS_OF[dtype][0]
    made = Scheme.from_dict({"data_type": dtype, "bits": bits}, base)
    assert made.weight.dtype == dtype and made.activation == base.activation
    if dtype == base.weight.dtype:
        assert made.weight.group_size == base.weight.group_size
    if base.activation.quantized and base.activation.dynamic:
        bits = base.activation.bits if base.activation.bits in BITS_OF[dtype] else BITS_OF[dtype][0]
        made = Scheme.from_dict({"act_data_type": dtype, "act_bits": bits}, base)
        assert made.activation.dtype == dtype and made.weight == base.weight


def test_no_fields_make_the_default() -> None:
    assert Scheme.from_dict({}) == W4


CHANNEL, PER_TENSOR_8 = WeightScheme(bits=8, group_size=-1, dtype="fp"), ActivationScheme(bits=8, dtype="fp", group_size=0)
MX4, MX8, NV4 = (PRESETS[name].activation for name in ("MXFP4", "MXFP8", "NVFP4"))
INT8_TOKEN, FP8_TOKEN = ActivationScheme(bits=8, dtype="int"), ActivationScheme(bits=8)


@pytest.mark.parametrize(
    ("base", "fields", "weight"),
    [
        ("W3A16G64", {"bits": 8}, WeightScheme(bits=8, group_size=64)),
        ("W3A16_ASYM", {"bits": 8, "group_size": 32}, WeightScheme(bits=8, group_size=32, symmetric=False)),
        ("W4A16", {"sym": False}, WeightScheme(bits=4, symmetric=False)),
        # another data type brings its group size, and its width where it has one
        ("W4A16", {"data_type": "mx_fp"}, PRESETS["MXFP4"].weight),
        ("W8A16G64", {"data_type": "mx_fp"}, PRESETS["MXFP8"].weight),
        ("W2A16", {"data_type": "nv_fp"}, PRESETS["NVFP4"].weight),
        ("W2A16", {"data_type": "mx_int"}, PRESETS["MXINT4"].weight),
        ("W4A16", {"data_type": "fp"}, CHANNEL),
        ("W4A16", {"data_type": "fp", "group_size": "128,128"}, PRESETS["FP8_BLOCK"].weight),
        ("W4A16", {"data_type": "fp", "group_size": (128, 128)}, PRESETS["FP8_BLOCK"].weight),
        ("W4A16", {"data_type": "fp", "group_size": 0}, PRESETS["FPW8A16"].weight),
        ("MXFP4A16", {"data_type": "int"}, W4.weight),
        ("NVFP4A16", {"data_type": "mx_fp"}, PRESETS["MXFP4"].weight),
        ("FPW8A16", {"data_type": "int"}, W8.weight),
        # the same one leaves it
        ("W4A16G64", {"data_type": "int"}, PRESETS["W4A16G64"].weight),
        ("FPW8A16", {"data_type": "fp"}, PRESETS["FPW8A16"].weight),
        # zero points are for integers
        ("W4A16_ASYM", {"data_type": "mx_fp"}, PRESETS["MXFP4"].weight),
        # names that tell the width
        ("W4A16", {"data_type": "mx_fp8"}, PRESETS["MXFP8"].weight),
        ("MXFP8A16", {"data_type": "mx_fp4"}, PRESETS["MXFP4"].weight),
    ],
)
def test_fields_of_weights_go_on_top_of_a_scheme(base: str, fields: dict[str, object], weight: WeightScheme) -> None:
    assert Scheme.from_dict(fields, PRESETS[base]) == Scheme(weight=weight)


@pytest.mark.parametrize(
    ("base", "fields", "activation"),
    [
        # act_bits alone: as the weights are
        ("W4A16", {"act_bits": 8}, INT8_TOKEN),
        ("FPW8A16", {"act_bits": 8}, FP8_TOKEN),
        ("MXFP4A16", {"act_bits": 4}, MX4),
        ("MXFP4A16", {"act_bits": 8}, MX8),
        ("NVFP4A16", {"act_bits": 4}, NV4),
        ("W4A16", {"act_bits": 8, "act_sym": None, "act_dynamic": None, "act_group_size": None, "act_data_type": None}, INT8_TOKEN),
        # any other type
        ("W4A16", {"act_bits": 8, "act_data_type": "fp"}, FP8_TOKEN),
        ("W4A16", {"act_bits": 4, "act_data_type": "nv_fp"}, NV4),
        ("W4A16", {"act_bits": 8, "act_data_type": "mx_fp8"}, MX8),
        ("W4A16", {"act_bits": 8, "act_group_size": 0}, ActivationScheme(bits=8, dtype="int", group_size=0)),
        ("W4A16", {"act_bits": 8, "act_sym": False}, ActivationScheme(bits=8, dtype="int", symmetric=False)),
        ("W4A16", {"act_bits": 8, "act_dynamic": False}, ActivationScheme(bits=8, dtype="int", group_size=0, dynamic=False)),
        # on top of activations that are quantized
        ("MXFP4", {"act_bits": 8}, MX8),
        ("FP8_BLOCK", {"act_group_size": -1}, FP8_TOKEN),
        ("FP8_DYNAMIC", {"act_group_size": 0, "act_dynamic": False}, PRESETS["FP8_STATIC"].activation),
        ("FP8_STATIC", {"act_dynamic": True}, PER_TENSOR_8),
        ("FP8_STATIC", {"act_data_type": "int"}, ActivationScheme(bits=8, dtype="int", group_size=0, dynamic=False)),
        ("FP8_DYNAMIC", {"act_data_type": "mx_fp"}, MX8),
        ("MXFP8", {"act_data_type": "int"}, INT8_TOKEN),
        ("NVFP4", {"act_data_type": "fp"}, FP8_TOKEN),
        ("NVFP4", {"act_data_type": "mx_fp4"}, MX4),
        ("MXFP8", {"act_data_type": "mx_fp_rceil"}, PRESETS["MXFP8_RCEIL"].activation),
        # none
        ("MXFP4", {"act_bits": 16}, ActivationScheme()),
        ("MXFP4", {"act_bits": None}, ActivationScheme()),
        ("MXFP4", {"act_data_type": "float"}, ActivationScheme()),
        ("FPW8A16", {"act_bits": 16, "act_data_type": "fp", "act_dynamic": True}, ActivationScheme()),  # as auto-round writes it
    ],
)
def test_fields_of_activations_go_on_top_of_a_scheme(base: str, fields: dict[str, object], activation: ActivationScheme) -> None:
    assert Scheme.from_dict(fields, PRESETS[base]) == Scheme(weight=PRESETS[base].weight, activation=activation)


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_change_weights_alone(bits: int) -> None:
    made = Scheme.from_dict({"bits": bits}, PRESETS["MXFP4"])
    assert made == Scheme(weight=PRESETS[f"MXFP{bits}"].weight, activation=PRESETS["MXFP4"].activation)


@pytest.mark.parametrize(
    ("alias", "dtype", "bits"),
    [
        ("int_sym", "int", 8), ("fp8", "fp", 8), ("fp8_e4m3", "fp", 8), ("mx_fp4", "mx_fp", 4), ("mx_fp8", "mx_fp", 8),
        ("mx_fp4e2m1", "mx_fp", 4), ("mx_fp8e4m3", "mx_fp", 8), ("mx_int4", "mx_int", 4), ("nv_fp4", "nv_fp", 4),
        ("nv_fp4_with_static_gs", "nv_fp", 4), ("mxfp", "mx_fp", 8), ("nvfp", "nv_fp", 4),
    ],
)  # fmt: skip
def test_other_names_of_data_types(alias: str, dtype: str, bits: int) -> None:
    for name in (alias, alias.upper()):
        made = Scheme.from_dict({"data_type": name, "act_bits": bits, "act_data_type": name}, W8)
        assert (made.weight.dtype, made.weight.bits, made.activation.dtype, made.activation.bits) == (dtype, bits, dtype, bits)


def test_every_other_name_is_tried_above() -> None:
    marks = test_other_names_of_data_types.pytestmark  # type: ignore[attr-defined]
    assert {row[0]: row[1] for row in marks[0].args[1]} == dict(ALIASES)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Presets

INT = {"sym": True, "data_type": "int", "act_bits": 16}
MX = {"group_size": 32, "data_type": "mx_fp", "act_group_size": 32, "act_sym": True, "act_dynamic": True}
TOKEN_INT = {
    "group_size": -1,
    "data_type": "int",
    "sym": True,
    "act_group_size": -1,
    "act_data_type": "int",
    "act_dynamic": True,
    "act_sym": True,
}
AUTO_ROUND: Mapping[str, Mapping[str, object]] = {
    **{f"W{bits}A16": {"bits": bits, "group_size": 128, **INT} for bits in range(2, 9)},
    **{f"W{bits}A16G64": {"bits": bits, "group_size": 64, **INT} for bits in range(2, 9)},
    **{f"W{bits}A16G32": {"bits": bits, "group_size": 32, **INT} for bits in range(2, 9)},
    "MXFP4": {"bits": 4, "act_bits": 4, "act_data_type": "mx_fp", **MX},
    "MXFP4_RCEIL": {"bits": 4, "act_bits": 4, "act_data_type": "mx_fp_rceil", **MX},
    "MXFP8": {"bits": 8, "act_bits": 8, "act_data_type": "mx_fp", **MX},
    "MXFP8_RCEIL": {"bits": 8, "act_bits": 8, "act_data_type": "mx_fp_rceil", **MX},
    "MXINT4": {"bits": 4, "act_bits": 4, "act_data_type": "mx_int", **MX, "data_type": "mx_int"},
    "NVFP4": {
        "bits": 4, "group_size": 16, "data_type": "nv_fp", "act_bits": 4, "act_data_type": "nv_fp4_with_static_gs", "act_group_size": 16,
        "act_sym": True, "act_dynamic": True,
    },
    "FPW8A16": {"bits": 8, "group_size": 0, "data_type": "fp", "act_bits": 16, "act_data_type": "fp"},
    "FP8_BLOCK": {
        "bits": 8, "group_size": (128, 128), "data_type": "fp", "act_bits": 8, "act_group_size": 128, "act_data_type": "fp",
        "act_dynamic": True, "act_sym": True,
    },
    "FP8_STATIC": {
        "bits": 8, "group_size": -1, "data_type": "fp", "act_bits": 8, "act_group_size": 0, "act_data_type": "fp", "act_dynamic": False,
        "act_sym": True,
    },
    "INT8": {"bits": 8, "act_bits": 8, **TOKEN_INT},
    "INT8_W8A8": {"bits": 8, "act_bits": 8, **TOKEN_INT},
    "INT4": {"bits": 4, "act_bits": 4, **TOKEN_INT},
}  # fmt: skip
"""PRESET_SCHEMES of auto-round 0.16.1 (auto_round/schemes.py), but what is in `NOT_YET` and `FLOAT_NAMES`, and GGUF's."""

NOT_AUTO_ROUNDS = {*(f"W{bits}A16_ASYM" for bits in range(2, 9)), "MXFP4A16", "MXFP8A16", "NVFP4A16", "FP8_DYNAMIC"}


@pytest.mark.parametrize("name", AUTO_ROUND)
def test_presets_are_auto_rounds(name: str) -> None:
    facts = AUTO_ROUND[name]
    scheme = PRESETS[name]
    assert Scheme.from_dict(facts) == scheme
    made = scheme.to_dict()
    made["group_size"] = tuple(made["group_size"]) if isinstance(made["group_size"], list) else made["group_size"]
    assert made["sym"] is True
    for field, value in facts.items():
        if field == "act_data_type" and facts["act_bits"] == 16:
            assert field not in made
        else:
            assert made[field] == ("nv_fp" if value == "nv_fp4_with_static_gs" else value)
    assert set(made) - set(facts) <= {"sym"}, "auto-round's default"


def test_presets_of_our_own() -> None:
    assert set(PRESETS) == set(AUTO_ROUND) | NOT_AUTO_ROUNDS
    for bits in range(2, 9):
        assert PRESETS[f"W{bits}A16_ASYM"] == Scheme(weight=WeightScheme(bits=bits, symmetric=False))
    for name in ("MXFP4", "MXFP8", "NVFP4"):
        assert PRESETS[f"{name}A16"] == Scheme(weight=PRESETS[name].weight)
    assert PRESETS["FP8_DYNAMIC"] == Scheme(weight=PRESETS["FP8_STATIC"].weight, activation=ActivationScheme(bits=8))


@pytest.mark.parametrize("name", PRESETS)
def test_names_in_any_case_with_any_dash(name: str) -> None:
    assert preset(name) is preset(name.lower()) is preset(name.replace("_", "-")) is PRESETS[name]


@pytest.mark.parametrize(
    ("name", "known"),
    [("w4a16-g32", "W4A16G32"), ("W2A16_g64", "W2A16G64"), ("w3a16_asym", "W3A16_ASYM"), ("fp8-dynamic", "FP8_DYNAMIC")],
)
def test_other_spellings_of_presets(name: str, known: str) -> None:
    assert preset(name) is PRESETS[known]


EVERY = ", ".join(PRESETS)


@pytest.mark.parametrize("name", [*NOT_YET, "mxfp6", "GGUF:Q4_K_M", "w4a16-mixed"])
def test_presets_to_come_are_refused_by_name(name: str) -> None:
    refused(lambda: preset(name), f"scheme {name!r} (--scheme) is not implemented yet; schemes are: {EVERY}")


@pytest.mark.parametrize("name", [*FLOAT_NAMES, "bf16"])
def test_floating_point_is_not_a_scheme_for_everything(name: str) -> None:
    message = f"scheme {name!r} (--scheme) quantizes nothing; leave layers out with --ignore_layers, or name it in --layer_config"
    refused(lambda: preset(name), message)


def test_unknown_presets_get_the_nearest_name() -> None:
    refused(lambda: preset("W4A61"), f"no scheme 'W4A61' (--scheme); did you mean 'W4A16'? Schemes: {EVERY}")
    refused(lambda: preset("four"), f"no scheme 'four' (--scheme). Schemes: {EVERY}")
    refused(lambda: preset("NVPF4", "--options"), f"no scheme 'NVPF4' (--options); did you mean 'NVFP4'? Schemes: {EVERY}")


# ---------------------------------------------------------------------------------------------------------------------------------------
# docs/schemes.md

PAGE = (Path(__file__).parent.parent / "docs" / "schemes.md").read_text(encoding="utf-8")


def table(title: str) -> list[list[str]]:
    """Rows of the first table under a heading."""
    lines = PAGE.split(f"## {title}\n")[1].split("\n\n|")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def documented() -> dict[str, tuple[str, str, str]]:
    """What the page says of each preset: weights, activations, bits."""
    found = {}
    for names, weight, activation, bits in table("Presets"):
        first, *others = re.findall(r"`(\w+)`", names)
        if " to " not in names:
            found.update(dict.fromkeys((first, *others), (weight, activation, bits)))
            continue
        for width in range(int(first[1]), int(others[-1][1]) + 1):
            found[f"W{width}{first[2:]}"] = (weight.replace("*b*", str(width)), activation, bits.replace("b", str(width)))
    return found


def test_the_page_has_every_preset() -> None:
    assert set(documented()) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_says_what_a_preset_is(name: str) -> None:
    weight, activation, bits = documented()[name]
    scheme = PRESETS[name]
    assert weight == scheme.weight.label
    assert activation == (scheme.activation.label if scheme.activation.quantized else "")
    terms = (term.split("/") for term in bits.split("+"))
    said = sum(float(term[0]) / float(term[1] if len(term) == 2 else 1) for term in terms)
    assert said == pytest.approx(scheme.weight.stored_bits((4096, 4096)) / 4096**2, abs=5e-4)


def test_the_page_has_every_field() -> None:
    assert [row[0].strip("`") for row in table("Fields")] == list(FIELDS)
    assert {f"`{flag}`" for flag in ACT_FLAGS.values()} <= {row[1] for row in table("Fields")}


def test_the_page_has_every_data_type() -> None:
    rows = {row[0].strip("`"): row for row in table("Data types")}
    assert list(rows) == list(BITS_OF)
    for dtype, row in rows.items():
        assert row[1] == ", ".join(map(str, BITS_OF[dtype]))
        assert row[2].startswith(str(GROUP_OF.get(dtype, "any")))
