"""The rules that give each layer its scheme."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenround.errors import UserError
from evenround.rules import FUSED, Override, SchemeRules, fused_groups, parse_layer_config, resolve_schemes, select, split_layers
from evenround.scheme import FLOAT_NAMES, PRESETS, Scheme, WeightScheme

W4 = PRESETS["W4A16"]
W8 = PRESETS["W8A16"]
EVERY_FIELD = "bits, group_size, sym, data_type, act_bits, act_group_size, act_sym, act_data_type, act_dynamic"


@dataclass(frozen=True)
class Layer:
    name: str
    shape: tuple[int, ...] = (256, 256)
    is_head: bool = False


def model(blocks: int = 12) -> list[Layer]:
    names = [f"model.layers.{n}.{part}" for n in range(blocks) for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")]
    return [*(Layer(name) for name in names), Layer("lm_head", is_head=True)]


def resolve(
    layer_config: Mapping[str, Override] | None = None,
    ignore: tuple[str, ...] = (),
    default: Scheme = W4,
    quant_lm_head: bool = False,
    sites: list[Layer] | None = None,
    ragged: bool = False,
) -> Mapping[str, Scheme | None]:
    rules = SchemeRules(default=default, ignore_layers=ignore, layer_config=layer_config or {}, quant_lm_head=quant_lm_head)
    return resolve_schemes(model() if sites is None else sites, rules, ragged_groups=ragged)


def having(table: Mapping[str, Scheme | None], scheme: Scheme | None) -> set[str]:
    return {name for name, value in table.items() if value == scheme}


def refused(action: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert str(caught.value) == message


# ---------------------------------------------------------------------------------------------------------------------------------------
# Which layer gets which scheme


def test_without_rules_everything_but_the_head_has_the_default() -> None:
    table = resolve()
    assert list(table) == [site.name for site in model()]
    assert having(table, None) == {"lm_head"} and len(having(table, W4)) == 36
    with pytest.raises(TypeError):
        table["lm_head"] = W4  # type: ignore[index]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("q_proj", 12),
        ("self_attn", 24),
        ("layers.1.", 3),  # a point is a point where that finds something
        ("layers.1", 3),  # and not layers 10 and 11
        ("layers.11", 3),
        ("model.layers.3.mlp.down_proj", 1),
        (r"layers\.(0|11)\.mlp", 2),
        (r"(?i)Q_PROJ$", 12),
        (r"layers.[0-9]\.", 30),
        ("re:model.*down_proj", 12),
        (r"re:.*layers\.1", 9),  # what follows re: is taken at its word
        (r"layers\.1\b", 3),
    ],
)
def test_patterns(pattern: str, count: int) -> None:
    assert len(having(resolve(ignore=(pattern,)), None)) == count + 1
    assert len(having(resolve({pattern: "W8A16"}), W8)) == count


def test_a_regular_expression_after_re_starts_at_the_beginning() -> None:
    assert select("re:model", ["model.layers.0"]) and not select("re:layers", ["model.layers.0"])
    assert select(r"re:h\.0", ["h.0", "h.0.fc"]) == {"h.0", "h.0.fc"}


def test_an_exact_name_is_that_layer_alone() -> None:
    sites = [Layer("h.0.fc"), Layer("h.0.fc_out"), Layer("x.h.0.fc")]
    assert having(resolve(ignore=("h.0.fc",), sites=sites), None) == {"h.0.fc"}
    assert having(resolve({"h.0.fc": "W8A16"}, sites=sites), W8) == {"h.0.fc"}


def test_an_exact_name_beats_a_pattern_wherever_it_stands() -> None:
    name = "model.layers.3.mlp.down_proj"
    for layer_config in ({name: "W8A16", "down_proj": "W2A16"}, {"down_proj": "W2A16", name: "W8A16"}):
        table = resolve(layer_config)
        assert table[name] == W8 and len(having(table, PRESETS["W2A16"])) == 11


def test_the_later_of_two_patterns_wins() -> None:
    table = resolve({"down_proj": "W2A16", r"layers\.[34]\.": "W8A16"})
    assert table["model.layers.3.mlp.down_proj"] == W8 and table["model.layers.5.mlp.down_proj"] == PRESETS["W2A16"]
    assert resolve({r"layers\.[34]\.": "W8A16", "down_proj": "W2A16"})["model.layers.3.mlp.down_proj"] == PRESETS["W2A16"]


def test_values_of_an_entry() -> None:
    base = Scheme(weight=WeightScheme(bits=3, group_size=32, symmetric=False))
    own = Scheme(weight=WeightScheme(bits=5, group_size=-1))
    table = resolve({"q_proj": {"bits": 8}, "k_proj": "w2a16", "down_proj": own}, default=base)
    assert table["model.layers.0.self_attn.q_proj"] == Scheme(weight=WeightScheme(bits=8, group_size=32, symmetric=False))
    assert table["model.layers.0.self_attn.k_proj"] == PRESETS["W2A16"]
    assert table["model.layers.0.mlp.down_proj"] == own


def test_sixteen_bits_are_floating_point() -> None:
    name = "model.layers.0.self_attn.q_proj"
    table = resolve({"q_proj": "W8A16", name: {"bits": 16}, "k_proj": {"bits": 16, "data_type": "int"}})
    assert having(table, None) == {name, "lm_head", *(site.name for site in model() if site.name.endswith("k_proj"))}


@pytest.mark.parametrize("value", [*FLOAT_NAMES, "bf16", "fp16", "Fp32"])
def test_names_of_floating_point(value: str) -> None:
    assert resolve({"model.layers.0.self_attn.q_proj": value, "layers.1.mlp": value})["model.layers.0.self_attn.q_proj"] is None
    assert len(having(resolve({"down_proj": value}, default=PRESETS["NVFP4"]), None)) == 13


@pytest.mark.parametrize("default", ["W4A16", "W3A16_ASYM", "MXFP4", "NVFP4", "FP8_STATIC", "FP8_BLOCK"])
@pytest.mark.parametrize(
    "value",
    [
        {"bits": 16},
        {"bits": 16, "act_bits": 16},
        {"bits": 16, "act_bits": None},
        {"bits": 16, "group_size": 128, "data_type": "fp", "act_bits": 16, "act_data_type": "fp"},  # auto-round's BF16
        {"bits": 16, "group_size": 128, "sym": True, "data_type": "float", "act_data_type": "float", "act_dynamic": True},
    ],
)
def test_sixteen_bits_are_floating_point_whatever_else_stands_there(default: str, value: Override) -> None:
    assert len(having(resolve({"down_proj": value}, default=PRESETS[default]), None)) == 13


def test_mixed_precision() -> None:
    table = resolve(
        {
            "q_proj": "FP8_DYNAMIC",
            "k_proj": {"data_type": "nv_fp", "act_data_type": "nv_fp"},
            "layers.0.mlp": {"bits": 8, "act_bits": 8},
            "layers.1.mlp": {"data_type": "int", "act_bits": 16},
            "layers.2.mlp": "BF16",
            "layers.3.mlp": {"data_type": "fp", "group_size": "128,128", "act_data_type": "fp", "act_group_size": 128},
            "layers.4.mlp": {"data_type": "fp", "group_size": [128, 128], "act_data_type": "fp", "act_group_size": 128},
        },
        default=PRESETS["MXFP4"],
    )
    assert having(table, PRESETS["FP8_DYNAMIC"]) == {f"model.layers.{n}.self_attn.q_proj" for n in range(12)}
    assert having(table, PRESETS["NVFP4"]) == {f"model.layers.{n}.self_attn.k_proj" for n in range(12)}
    assert having(table, PRESETS["MXFP8"]) == {"model.layers.0.mlp.down_proj"}
    assert having(table, W4) == {"model.layers.1.mlp.down_proj"}
    assert having(table, None) == {"model.layers.2.mlp.down_proj", "lm_head"}
    assert having(table, PRESETS["FP8_BLOCK"]) == {"model.layers.3.mlp.down_proj", "model.layers.4.mlp.down_proj"}
    assert having(table, PRESETS["MXFP4"]) == {f"model.layers.{n}.mlp.down_proj" for n in range(5, 12)}


def test_the_example_in_the_documentation() -> None:
    page = (Path(__file__).parent.parent / "docs" / "schemes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    table = resolve(parse_layer_config(example), default=PRESETS["MXFP4"])
    assert len(having(table, PRESETS["MXFP8"])) == 10, "down_proj, but of two layers"
    assert having(table, PRESETS["FP8_DYNAMIC"]) == {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"}
    assert len(having(table, PRESETS["NVFP4"])) == 12, "also that of layer 0: the later pattern wins"
    assert having(table, None) == {"model.layers.11.mlp.down_proj", "lm_head"}


def test_ignoring_beats_everything() -> None:
    name = "model.layers.0.self_attn.q_proj"
    table = resolve({name: "W8A16", "q_proj": "W8A16"}, ignore=("layers.0",))
    assert table[name] is None and len(having(table, W8)) == 11


def test_the_output_head() -> None:
    assert resolve(quant_lm_head=True)["lm_head"] == W4
    assert resolve({"lm_head": "W8A16"}, quant_lm_head=True)["lm_head"] == W8
    assert resolve(quant_lm_head=True, ignore=("lm_head",))["lm_head"] is None
    assert resolve(ignore=("lm_head",))["lm_head"] is None
    assert resolve({"lm_head": {"bits": 16}})["lm_head"] is None
    assert resolve({"lm_head": {"bits": 16}}, quant_lm_head=True)["lm_head"] is None
    assert resolve({"head|q_proj": "W8A16"})["lm_head"] is None  # a pattern that names others as well


@pytest.mark.parametrize("pattern", ["lm_head", "head$", "re:lm_.*"])
def test_an_entry_for_the_head_alone_needs_the_flag(pattern: str) -> None:
    refused(
        lambda: resolve({pattern: "W8A16"}),
        f"{pattern!r} (--layer_config) names the output head, which is left alone unless --quant_lm_head is given",
    )


def test_a_model_without_a_head() -> None:
    refused(
        lambda: resolve(sites=model()[:-1], quant_lm_head=True),
        "--quant_lm_head: this model has no output head that can be quantized; leave the flag out",
    )


@pytest.mark.parametrize(
    ("pattern", "rest"),
    [
        ("q_prj", "matches no layer; did you mean 'q_proj'?"),
        ("re:q_proj", "matches no layer; did you mean 'q_proj'?"),
        ("model.layers.3.mlp.down_prj", "matches no layer; did you mean 'model.layers.3.mlp.down_proj'?"),
        ("12345", "matches no layer; names end in down_proj, k_proj, lm_head, q_proj"),
        ("*.mlp", "is neither part of a layer's name nor a regular expression (nothing to repeat at position 0)"),
        ("re:(mlp", "is neither part of a layer's name nor a regular expression (missing ), unterminated subpattern at position 0)"),
    ],
)
def test_a_pattern_that_matches_nothing(pattern: str, rest: str) -> None:
    refused(lambda: resolve(ignore=(pattern,)), f"{pattern!r} (--ignore_layers) {rest}")
    refused(lambda: resolve({pattern: "W8A16"}), f"{pattern!r} (--layer_config) {rest}")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("W4A61", f"no scheme 'W4A61' (--layer_config 'q_proj'); did you mean 'W4A16'? Schemes: {', '.join(PRESETS)}"),
        (
            "MXFP6",
            f"scheme 'MXFP6' (--layer_config 'q_proj') is not implemented yet; schemes are: {', '.join(PRESETS)}",
        ),
        ({"bits": 9}, "--layer_config 'q_proj': bits 9 (--bits) must be a whole number from 2 to 8"),
        ({"bit": 8}, f"--layer_config 'q_proj': unknown scheme field 'bit'; did you mean 'bits'? Fields: {EVERY_FIELD}"),
        ({"bits": 16, "zzz": 8}, f"--layer_config 'q_proj': unknown scheme field 'zzz'. Fields: {EVERY_FIELD}"),
        (
            {"bits": 16, "act_bits": 8},
            "--layer_config 'q_proj': bits 16 leaves the layer in floating point, act_bits 8 does not; leave one out",
        ),
        (
            {"act_group_size": 32},
            "--layer_config 'q_proj': act_group_size 32 (--act_group_size) would change nothing: activations are not quantized; "
            "add act_bits 8 or 4 (--act_bits)",
        ),
        ({"data_type": "fp", "sym": False}, "--layer_config 'q_proj': data type 'fp' has no zero points; leave --asym out"),
        (
            {"data_type": ["fp"]},
            "--layer_config 'q_proj': data type ['fp'] (--data_type) is not known; did you mean 'fp'? "
            "Types: int, fp, mx_fp, mx_fp_rceil, mx_int, nv_fp",
        ),
        (8, "--layer_config 'q_proj': 8 must be a scheme name or an object of scheme fields"),
        (None, "--layer_config 'q_proj': None must be a scheme name or an object of scheme fields"),
        (["W8A16"], "--layer_config 'q_proj': ['W8A16'] must be a scheme name or an object of scheme fields"),
    ],
)
def test_a_wrong_entry_is_refused_even_where_others_override_it(value: Override, message: str) -> None:
    refused(lambda: resolve({"q_proj": value}), message)
    refused(lambda: resolve({"q_proj": value, "self_attn": "W8A16"}), message)


def test_nothing_left_to_quantize() -> None:
    message = "every layer is left in floating point (--ignore_layers, --layer_config): there is nothing to quantize"
    refused(lambda: resolve(ignore=("proj",)), message)
    refused(lambda: resolve({"proj": {"bits": 16}}), message)


def test_a_group_that_does_not_divide_a_width_names_the_layer_and_the_groups_that_would() -> None:
    sites = [Layer("a.up", (64, 512)), Layer("a.down", (512, 576))]
    tail = "or -1 (per output channel). Or leave the layer out with --ignore_layers. Only --format fake can hold a ragged last group"
    refused(
        lambda: resolve(sites=sites),
        f"group_size 128 (--group_size) does not divide the width 576 of a.down; groups that would: 16, 32, 64, 96, 192, {tail}",
    )
    refused(
        lambda: resolve(sites=[Layer("odd", (8, 50))]),
        f"group_size 128 (--group_size) does not divide the width 50 of odd; groups that would: none, {tail}",
    )
    assert resolve(sites=sites, ragged=True)["a.down"] == W4
    assert resolve({"down": {"group_size": 64}}, sites=sites)["a.down"] == PRESETS["W4A16G64"]
    assert resolve(sites=sites, ignore=("down",))["a.down"] is None
    for group_size in (-1, 0):
        assert resolve(sites=sites, default=Scheme(weight=WeightScheme(bits=4, group_size=group_size)))["a.down"] is not None


def test_data_types_whose_groups_do_not_divide_a_width() -> None:
    """They have one group size: there is no other to advise, and for activations no scale per token."""
    odd, tail = [Layer("odd", (64, 48))], "leave the layer out with --ignore_layers"
    only_fake = "Only --format fake can hold a ragged last group"
    refused(
        lambda: resolve(sites=odd, default=PRESETS["MXFP4A16"]),
        f"group_size 32 (--group_size) does not divide the width 48 of odd; data type 'mx_fp' has no others: {tail}. {only_fake}",
    )
    assert resolve(sites=odd, default=PRESETS["MXFP4A16"], ragged=True)["odd"] == PRESETS["MXFP4A16"]
    assert resolve(sites=odd, default=PRESETS["NVFP4"])["odd"] == PRESETS["NVFP4"]
    for ragged in (False, True):
        refused(
            lambda ragged=ragged: resolve(sites=odd, default=PRESETS["MXFP4"], ragged=ragged),  # type: ignore[misc]
            f"act_group_size 32 (--act_group_size) does not divide the width 48 of odd; {tail}",
        )
        refused(
            lambda ragged=ragged: resolve(sites=odd, default=PRESETS["FP8_BLOCK"], ragged=ragged),  # type: ignore[misc]
            f"act_group_size 128 (--act_group_size) does not divide the width 48 of odd; {tail}, or quantize its input per token (-1)",
        )
    per_token = Scheme.from_dict({"act_group_size": -1}, PRESETS["FP8_BLOCK"])
    assert resolve(sites=odd, default=per_token)["odd"] == per_token, "tiles may be cut at the edges"
    for name in ("FP8_STATIC", "FP8_DYNAMIC", "INT8", "INT4", "FPW8A16"):
        assert resolve(sites=[Layer("odd", (7, 5))], default=PRESETS[name])["odd"] == PRESETS[name]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Layers that servers run as one

lasts = st.sampled_from([last for row in FUSED for last in row] + ["o_proj", "down_proj", "w2"])


@settings(max_examples=60, deadline=None)
@given(names=st.lists(st.tuples(st.sampled_from(["a.0", "a.1", "b"]), lasts).map(".".join), unique=True))
def test_fused_groups_are_all_names_once_by_parent(names: list[str]) -> None:
    groups = fused_groups(names)
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert [group[0] for group in groups] == sorted((group[0] for group in groups), key=names.index)
    for group in groups:
        assert list(group) == sorted(group, key=names.index) and len({name.rpartition(".")[0] for name in group}) == 1
        assert len(group) == 1 or any({name.rpartition(".")[2] for name in group} <= set(row) for row in FUSED)
    heads = {name: group for group in groups for name in group}
    for row in FUSED:
        for parent in ("a.0", "a.1", "b"):
            assert len({heads[name] for last in row if (name := f"{parent}.{last}") in heads}) <= 1


def test_fused_layers() -> None:
    assert [row for row in FUSED if "q_proj" in row or "gate_proj" in row] == [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
    assert len({last for row in FUSED for last in row}) == sum(map(len, FUSED)), "a name is fused one way"


# ---------------------------------------------------------------------------------------------------------------------------------------
# --layer_config as text

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+){0,3}", fullmatch=True).filter(
    lambda name: name.lower() not in ("true", "false", "null")
)
text = st.text(max_size=12)
fields = st.dictionaries(
    st.sampled_from(["bits", "group_size", "sym", "data_type"]), st.one_of(st.integers(-1, 512), st.booleans(), names), max_size=4
)


@settings(max_examples=60, deadline=None)
@given(
    config=st.dictionaries(
        text, st.one_of(text, st.dictionaries(text, st.one_of(st.integers(), st.booleans(), text), max_size=3)), max_size=3
    )
)
def test_json_means_itself(config: dict[str, Override]) -> None:
    assert parse_layer_config(json.dumps(config)) == config


@settings(max_examples=60, deadline=None)
@given(
    config=st.dictionaries(names, st.one_of(names, fields), max_size=4), space=st.sampled_from(["", " "]), quote=st.sampled_from(["", "'"])
)
def test_the_loose_form_means_what_json_would(config: dict[str, Override], space: str, quote: str) -> None:
    def loose(value: object) -> str:
        if isinstance(value, dict):
            return "{" + f",{space}".join(f"{loose(key)}{space}:{space}{loose(item)}" for key, item in value.items()) + "}"
        return f"{quote}{value}{quote}" if isinstance(value, str) else str(value)

    assert parse_layer_config(loose(config)) == config


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("{}", {}),
        ("{mlp.down_proj:{bits:8,group_size:32},k_proj:W8A16}", {"mlp.down_proj": {"bits": 8, "group_size": 32}, "k_proj": "W8A16"}),
        ("{k_proj: {bits: 8, group_size: -1, sym: False}}", {"k_proj": {"bits": 8, "group_size": -1, "sym": False}}),
        ("{'k_proj': {'bits': 8}}", {"k_proj": {"bits": 8}}),
        (r"{.*\.[qk]_proj$: W8A16}", {r".*\.[qk]_proj$": "W8A16"}),
        (r"{layers\.(0|1)\.: {bits: 16}}", {r"layers\.(0|1)\.": {"bits": 16}}),
        ('{"re:.*q_proj": "W8A16"}', {"re:.*q_proj": "W8A16"}),
        ("{k_proj:BF16,q_proj:{data_type:mx_fp8,act_bits:8}}", {"k_proj": "BF16", "q_proj": {"data_type": "mx_fp8", "act_bits": 8}}),
        ("{k_proj:{data_type:fp,group_size:'128,128'}}", {"k_proj": {"data_type": "fp", "group_size": "128,128"}}),
        ('{"k_proj": {"group_size": [128, 128]}}', {"k_proj": {"group_size": [128, 128]}}),
    ],
)
def test_forms_of_layer_config(text: str, config: dict[str, Override]) -> None:
    assert parse_layer_config(text) == config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{k_proj:W8A16", "Expecting value near 'W8A16'"),
        ("{k_proj:{bits:8}", "Expecting ',' delimiter at its end"),
        ("{k_proj W8A16}", "Expecting property name enclosed in double quotes near 'k_proj \"W8A16\"}'"),
        ("", "Expecting value at its end"),
    ],
)
def test_layer_config_that_cannot_be_read(text: str, reason: str) -> None:
    refused(
        lambda: parse_layer_config(text),
        f"layer_config {text!r} (--layer_config) cannot be read: {reason}; "
        'write JSON such as {"mlp.down_proj": {"bits": 8}, "k_proj": "W8A16"}',
    )


@pytest.mark.parametrize("text", ["[]", '"W8A16"', "8", "null"])
def test_layer_config_that_is_no_object(text: str) -> None:
    refused(lambda: parse_layer_config(text), f"layer_config {text!r} (--layer_config) must be an object: name or pattern → scheme")


def test_layers_that_servers_fuse_and_that_have_different_schemes() -> None:
    names = [f"model.layers.{block}.self_attn.{part}" for block in range(2) for part in ("q_proj", "k_proj", "v_proj")]
    table: dict[str, Scheme | None] = dict.fromkeys([*names, "model.layers.0.mlp.down_proj"], W4)
    assert split_layers(table) == ()
    table["model.layers.1.self_attn.k_proj"] = W8
    table["model.layers.0.mlp.down_proj"] = None
    assert split_layers(table) == (tuple(names[3:]),)
    table["model.layers.0.self_attn.v_proj"] = None
    assert split_layers(table) == (tuple(names[:3]), tuple(names[3:]))


def test_one_dynamic_scale_for_a_whole_batch_is_refused() -> None:
    scheme = Scheme.from_dict({"act_bits": 8, "act_group_size": 0}, W8)
    with pytest.raises(UserError) as caught:
        resolve_schemes(model(), SchemeRules(default=scheme))
    assert str(caught.value) == (
        "act_group_size 0 (--act_group_size) of model.layers.0.self_attn.q_proj with dynamic scales: one scale for a batch would make "
        "results depend on how many samples are computed at once; add --disable_act_dynamic, or quantize per token (-1)"
    )
    static = Scheme.from_dict({"act_bits": 8, "act_group_size": 0, "act_dynamic": False}, W8)
    assert all(found == static for name, found in resolve_schemes(model(), SchemeRules(default=static)).items() if name != "lm_head")
