"""Mixed precision: groups that servers run as one, the exact choice under a budget, measured sensitivity."""

import itertools
import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from conftest import ARCHITECTURES, save_model
from evenround.calls import outside_blocks
from evenround.chains import HOST, Chain, Home
from evenround.checkpoint import Checkpoint
from evenround.errors import UserError
from evenround.knapsack import choose
from evenround.memory.simulate import SimulatedDevices
from evenround.mixed import Measurement, Mixture, mixed_schemes, option_bits, parse_options, sensitivities, serving_groups
from evenround.model import Site, Skeleton, skeleton_from
from evenround.numerics.weights import quantize
from evenround.rules import SchemeRules, fused_groups
from evenround.scheme import PRESETS, ActivationScheme, Scheme, WeightScheme
from small_jobs import GIB, skeleton_of

G32 = {bits: Scheme(weight=WeightScheme(bits=bits, group_size=32)) for bits in (2, 3, 4, 8)}
RULES = SchemeRules(default=G32[4])


def measurement(samples: int = 3, length: int = 12, mask: Tensor | None = None, seed: int = 7) -> Measurement:
    tokens = torch.randint(3, 128, (samples, length), generator=torch.Generator().manual_seed(seed))
    return Measurement(tokens=tokens, mask=mask, dtype=torch.float32)


def test_layers_that_servers_fuse_are_one_group() -> None:
    names = [f"model.layers.0.self_attn.{last}" for last in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names += [f"model.layers.0.mlp.{last}" for last in ("gate_proj", "up_proj", "down_proj")] + ["lm_head"]
    assert fused_groups(names) == (tuple(names[:3]), (names[3],), tuple(names[4:6]), (names[6],), ("lm_head",))
    assert serving_groups(names) == fused_groups(names)


def test_each_expert_fuses_its_own_and_all_have_one_scheme() -> None:
    names = [f"model.layers.0.experts.{expert}.{last}" for expert in range(2) for last in ("w1", "w2", "w3")]
    assert fused_groups(names) == ((names[0], names[2]), (names[1],), (names[3], names[5]), (names[4],))
    other = ["model.layers.0.shared_expert.gate_proj", "model.layers.1.experts.0.w2"]
    assert [set(group) for group in serving_groups([*names, *other])] == [set(names), {other[0]}, {other[1]}]


def test_fused_layers_keep_the_order_of_names_and_may_be_few() -> None:
    assert fused_groups(["a.kv_a_proj_with_mqa", "b.q_proj", "a.q_a_proj", "b.v_proj"]) == (
        ("a.kv_a_proj_with_mqa", "a.q_a_proj"),
        ("b.q_proj", "b.v_proj"),
    )
    assert fused_groups(["q_proj"]) == (("q_proj",),)
    assert fused_groups([]) == ()
    assert fused_groups(["h.0.attn.c_attn", "h.0.attn.c_proj"]) == (("h.0.attn.c_attn",), ("h.0.attn.c_proj",))


# --- The choice

an_option = st.tuples(st.one_of(st.integers(0, 5), st.floats(0, 5), st.just(math.inf)), st.integers(0, 12))
a_group = st.lists(an_option, min_size=1, max_size=4).filter(lambda options: any(cost < math.inf for cost, _ in options))


@given(groups=st.lists(a_group, max_size=6), budget=st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_no_choice_is_better(groups: list[list[tuple[float, int]]], budget: int) -> None:
    costs = {at: [cost for cost, _ in group] for at, group in enumerate(groups)}
    bits = {at: [size for _, size in group] for at, group in enumerate(groups)}
    every = [(math.fsum(cost for cost, _ in picked), sum(size for _, size in picked)) for picked in itertools.product(*groups)]
    fitting = [cost for cost, size in every if size <= budget and cost < math.inf]
    if not fitting:
        least = min(size for cost, size in every if cost < math.inf)
        with pytest.raises(UserError, match=f"a budget of {budget} bits is too small: the smallest options take {least}"):
            choose(costs, bits, budget)
        return
    chosen = choose(costs, bits, budget)
    assert list(chosen) == list(costs)
    assert sum(bits[group][at] for group, at in chosen.items()) <= budget
    assert math.fsum(costs[group][at] for group, at in chosen.items()) == pytest.approx(min(fitting), abs=1e-12)


def test_of_equal_costs_fewer_bits() -> None:
    assert choose({"a": [1.0, 1.0, 2.0], "b": [0.0, 0.0]}, {"a": [4, 3, 2], "b": [8, 2]}, 100) == {"a": 1, "b": 1}


def test_five_hundred_layers_take_no_time() -> None:
    draw = random.Random(0)
    costs, bits = {}, {}
    for group in range(500):
        size = draw.choice([4096 * 6144, 4096 * 4096, 4096 * 24576, 4096 * 12288])
        weight = math.exp(draw.gauss(0, 1.5)) * size
        costs[group] = [weight * 4.0**-number * math.exp(draw.gauss(0, 0.1)) for number in (2, 3, 4)] + [0.0]
        bits[group] = [size * eighths // 8 for eighths in (17, 25, 33, 128)]
    budget = sum(sizes[3] for sizes in bits.values()) // 16 * 7 // 2
    start = time.process_time()
    chosen = choose(costs, bits, budget)
    assert time.process_time() - start < 10
    assert budget * 0.999 < sum(bits[group][at] for group, at in chosen.items()) <= budget


# --- Options


def test_options_are_presets_and_floating_point() -> None:
    assert parse_options(" W2A16, w4a16 ,bf16") == (PRESETS["W2A16"], PRESETS["W4A16"], None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("W4A16", "leave nothing to choose; give at least two schemes, such as W2A16,W4A16"),
        ("", "leave nothing to choose"),
        ("W4A16,W4A16", "name a scheme twice; leave one out"),
        ("W4A16,W5A17", r"no scheme 'W5A17' \(--options\), nearest is|no scheme 'W5A17' \(--options\)"),
    ],
)
def test_options_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_options(text)


def test_bits_count_scales() -> None:
    assert option_bits(None, (64, 96)) == 16 * 64 * 96
    assert option_bits(G32[2], (64, 96)) == 2 * 64 * 96 + 16 * 64 * 3


# --- Sensitivity


def by_the_whole_model(skeleton: Skeleton, sites: list[Site], option: Scheme, how: Measurement) -> dict[str, float]:
    """½ Σ (g·δ)² / tokens, of the whole model in memory."""
    every = [*outside_blocks(skeleton), *skeleton.block_names, skeleton.sites[-1].name]
    generator, sums = torch.Generator().manual_seed(how.seed), dict.fromkeys([site.name for site in sites], 0.0)
    with skeleton.materialized(every, torch.float32):
        for row in range(len(how.tokens)):
            given: dict[str, tuple[Tensor, Tensor]] = {}

            def keep(name: str, given: dict[str, tuple[Tensor, Tensor]] = given):  # type: ignore[no-untyped-def]
                return lambda module, args, output: given.update({name: (args[0].detach(), output)})

            modules = {site.name: skeleton.model.get_submodule(site.name) for site in sites}
            handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
            embedding = skeleton.model.get_input_embeddings().weight
            embedding.requires_grad_()
            mask = None if how.mask is None else how.mask[row : row + 1].long()
            logits = skeleton.model(input_ids=how.tokens[row : row + 1], attention_mask=mask, use_cache=False).logits
            predicted = functional.log_softmax(logits.float(), dim=-1)[0]
            drawn = torch.multinomial(predicted.detach().exp(), 1, generator=generator)
            loss = -predicted.gather(-1, drawn)[:, 0]
            loss = (loss if how.mask is None else loss * how.mask[row]).sum()
            gradients = torch.autograd.grad(loss, [given[site.name][1] for site in sites])
            embedding.requires_grad_(False)
            for handle in handles:
                handle.remove()
            for site, gradient in zip(sites, gradients, strict=True):
                weight = modules[site.name].weight.detach()
                weight = weight.t() if site.transposed else weight
                change = quantize(weight.contiguous(), option.weight).dequantize() - weight
                sums[site.name] += float((gradient * (given[site.name][0] @ change.t())).sum(-1).square().sum())
    counted = how.tokens.numel() if how.mask is None else int(how.mask.sum())
    return {name: total / counted / 2 for name, total in sums.items()}


def test_one_block_at_a_time_gives_what_the_whole_model_does(architecture: str) -> None:
    skeleton, how = skeleton_of(architecture), measurement()
    sites = [site for site in skeleton.sites if not (site.is_head and skeleton.tied)]
    expected = by_the_whole_model(skeleton, sites, G32[3], how)
    found = sensitivities(skeleton, sites, [G32[3], None], how)
    assert {name: costs[1] for name, costs in found.items()} == dict.fromkeys(expected, 0.0)
    for name, cost in expected.items():
        assert found[name][0] == pytest.approx(cost, rel=1e-3), name


def test_padding_changes_nothing() -> None:
    skeleton = skeleton_of("llama")
    mask = torch.arange(12) < torch.tensor([12, 7, 9])[:, None]
    how = measurement(mask=mask)
    other = replace(how, tokens=torch.where(mask, how.tokens, 5))
    sites = list(skeleton.sites)
    found, again = (sensitivities(skeleton, sites, [G32[2]], each) for each in (how, other))
    expected = by_the_whole_model(skeleton, sites, G32[2], how)
    for name, (cost,) in found.items():
        assert again[name][0] == pytest.approx(cost, rel=1e-4)
        assert expected[name] == pytest.approx(cost, rel=1e-3)


def test_costs_are_the_divergence_of_a_single_layer(tiny: Path) -> None:
    """On a trained model, against the KL of the model with that layer alone quantized, on other text."""
    skeleton = skeleton_from(tiny, Checkpoint.open(tiny))
    tokens = text_rows(tiny)
    how = Measurement(tokens=tokens[:8], mask=None, dtype=torch.float32)
    sites = [site for site in skeleton.sites if site.name.endswith(("0.self_attn.v_proj", "1.mlp.down_proj", "3.mlp.up_proj"))]
    costs = sensitivities(skeleton, sites, [PRESETS["W3A16"]], how)
    with skeleton.materialized([*outside_blocks(skeleton), *skeleton.block_names, skeleton.sites[-1].name], torch.float32):
        model = skeleton.model
        with torch.no_grad():
            reference = functional.log_softmax(model(input_ids=tokens[8:], use_cache=False).logits, dim=-1)
            for site in sites:
                module = model.get_submodule(site.name)
                before = module.weight.clone()
                module.weight.copy_(quantize(before, PRESETS["W3A16"].weight).dequantize())
                moved = functional.log_softmax(model(input_ids=tokens[8:], use_cache=False).logits, dim=-1)
                module.weight.copy_(before)
                divergence = float((reference.exp() * (reference - moved)).sum(-1).mean())
                assert costs[site.name][0] == pytest.approx(divergence, rel=0.4), site.name


def text_rows(folder: Path, rows: int = 16, length: int = 128) -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = (Path(__file__).parent / "data" / "calibration.txt").read_text()[:20_000]
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"][: rows * length]).view(rows, length)


def test_quantized_inputs_cost_more() -> None:
    skeleton, how = skeleton_of("llama"), measurement()
    sites = [site for site in skeleton.sites if not site.is_head]
    names = ("MXFP4", "MXFP4A16", "NVFP4", "NVFP4A16", "FP8_STATIC", "FPW8A16", "INT8")
    found = sensitivities(skeleton, sites, [PRESETS[name] for name in names], how)
    total = dict(zip(names, (sum(column) for column in zip(*found.values(), strict=True)), strict=True))
    assert total["MXFP4"] > total["MXFP4A16"] > total["INT8"] > 0
    assert total["NVFP4"] > total["NVFP4A16"] > total["FP8_STATIC"] > total["FPW8A16"] > 0


def test_inputs_of_blocks_may_be_kept_elsewhere(tmp_path: Path) -> None:
    skeleton, how, shapes = skeleton_of("llama"), measurement(), []

    def store(shape: tuple[int, ...]) -> Chain:
        shapes.append(shape)
        return Chain.empty(shape, torch.float32, (Home(HOST, shape[0], tmp_path),))

    heard: list[str] = []
    there = sensitivities(skeleton, skeleton.sites, [G32[2]], replace(how, store=store), heard.append)
    assert there == sensitivities(skeleton, skeleton.sites, [G32[2]], how)
    assert shapes == [(3, 12, 64)] * 4
    assert heard == [*skeleton.block_names, *reversed(skeleton.block_names)]


def test_one_block_is_on_the_device_at_a_time() -> None:
    skeleton, how = skeleton_of("llama"), measurement()
    rows = [replace(how, device=torch.device("cpu", 0)), how]
    with SimulatedDevices([GIB]) as devices:
        found = sensitivities(skeleton, skeleton.sites[:-1], [G32[2], G32[4]], rows[0])
        assert devices.used == (0,)
        block = sum(tensor.numel() for tensor in skeleton.block(0).parameters()) * 4
        outside = 2 * 128 * 64 * 4
        assert max(3 * block, outside) < devices.peak[0] < 4 * block + outside
    for name, costs in sensitivities(skeleton, skeleton.sites[:-1], [G32[2], G32[4]], how).items():
        assert found[name] == pytest.approx(costs, rel=1e-5)


def test_few_rows_are_used() -> None:
    skeleton = skeleton_of("llama")
    sites = skeleton.sites[:1]
    many, few = measurement(samples=20), measurement(samples=20)
    few = replace(few, tokens=few.tokens[:16])
    assert sensitivities(skeleton, sites, [G32[2]], many) == sensitivities(skeleton, sites, [G32[2]], few)


def damaged(folder: Path, **values: float) -> Skeleton:
    """A model whose second block has these weights everywhere."""
    model = save_model(ARCHITECTURES["llama"], folder)
    with torch.no_grad():
        for name, value in values.items():
            model.model.layers[1].mlp.get_submodule(name).weight.fill_(value)
    model.save_pretrained(folder)
    return skeleton_from(folder, Checkpoint.open(folder))


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    skeleton = damaged(tmp_path, up_proj=1e30, down_proj=1e30)
    with pytest.raises(UserError, match=r"the float output of model.layers.1 for calibration sample 0 is NaN or infinite in torch.float32"):
        sensitivities(skeleton, skeleton.sites, [G32[2]], measurement())


def test_predictions_that_are_not_finite(tmp_path: Path) -> None:
    model = save_model(ARCHITECTURES["llama"], tmp_path)
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)
    model.save_pretrained(tmp_path)
    skeleton = skeleton_from(tmp_path, Checkpoint.open(tmp_path))
    with pytest.raises(UserError, match="predictions for calibration sample 0 are NaN or infinite in torch.float32: try --compute_dtype"):
        sensitivities(skeleton, skeleton.sites, [G32[2]], measurement())


def test_costs_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenround.mixed.fake_quantize", lambda values, scheme, scale: values * math.inf)
    skeleton = skeleton_of("llama")
    message = r"what quantizing lm_head costs is NaN or infinite in torch.float32: try --compute_dtype float32, or name the layer"
    with pytest.raises(UserError, match=message):
        sensitivities(skeleton, skeleton.sites, [PRESETS["MXFP4"]], measurement())


def test_layers_that_no_token_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = skeleton_of("llama")
    attention = skeleton.model.get_submodule("model.layers.0.self_attn")
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **_: (hidden_states, None))
    message = (
        r"no token of the calibration text reaches model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, "
        r"model.layers.0.self_attn.v_proj, so that no scheme can be chosen for it; give more text, or name it in --layer_config"
    )
    with pytest.raises(UserError, match=message):
        sensitivities(skeleton, skeleton.sites, [G32[2]], measurement())


def test_a_scale_that_does_not_fit(tmp_path: Path) -> None:
    model = save_model(ARCHITECTURES["llama"], tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path)
    skeleton = skeleton_from(tmp_path, Checkpoint.open(tmp_path))
    with pytest.raises(
        UserError, match=r"model.layers.1.mlp.down_proj: a scale .* does not fit float16; leave it out with --ignore_layers"
    ):
        sensitivities(skeleton, skeleton.sites, [G32[2]], measurement())


# --- The whole


def chosen_for(
    options: tuple[Scheme | None, ...], avg_bits: float, rules: SchemeRules = RULES, architecture: str = "llama", **more: object
) -> Mixture:
    return mixed_schemes(skeleton_of(architecture), rules, options, avg_bits, measurement(), **more)  # type: ignore[arg-type]


def mean_bits(skeleton: Skeleton, mixture: Mixture, head: bool = False) -> float:
    sites = [site for site in skeleton.sites if head or not site.is_head]
    return sum(option_bits(mixture.schemes[site.name], site.shape) for site in sites) / sum(math.prod(site.shape) for site in sites)


@pytest.mark.parametrize("avg_bits", [2.5, 2.501, 3.1, 4.5, 5, 7.7, 15.9])
def test_never_above_the_target(avg_bits: float) -> None:
    skeleton, mixture = skeleton_of("llama"), chosen_for((G32[2], G32[4], None), avg_bits)
    assert mixture.mean_bits == mean_bits(skeleton, mixture) <= avg_bits
    assert mixture.mean_bits > avg_bits - 1
    assert list(mixture.schemes) == [site.name for site in skeleton.sites]
    assert mixture.schemes["lm_head"] is None
    for group in serving_groups([site.name for site in skeleton.sites]):
        assert len({mixture.schemes[name] for name in group}) == 1
    assert mixture.cost == pytest.approx(sum(mixture.costs[name][at] for name, at in mixture.chosen.items()))


def test_more_bits_cost_less() -> None:
    costs = [chosen_for((G32[2], G32[3], G32[4], G32[8]), avg_bits).cost for avg_bits in (2.5, 3, 4, 6, 8.5)]
    assert costs == sorted(costs, reverse=True)


def test_what_the_user_names_is_kept_and_counts() -> None:
    skeleton = skeleton_of("llama")
    rules = replace(RULES, layer_config={"layers.0.mlp": G32[8], "k_proj": {"bits": 3}}, ignore_layers=("layers.1.mlp.down_proj",))
    mixture = chosen_for((G32[2], G32[4]), 5.5, rules)
    assert {mixture.schemes[f"model.layers.0.mlp.{last}_proj"] for last in ("gate", "up", "down")} == {G32[8]}
    assert mixture.schemes["model.layers.2.self_attn.k_proj"] == G32[3]
    assert mixture.schemes["model.layers.1.mlp.down_proj"] is None
    assert mixture.schemes["model.layers.2.self_attn.q_proj"] == mixture.schemes["model.layers.2.self_attn.v_proj"]
    assert "model.layers.0.mlp.up_proj" not in mixture.chosen
    assert mixture.mean_bits == mean_bits(skeleton, mixture) <= 5.5


def test_the_head_takes_part_if_it_is_quantized() -> None:
    skeleton = skeleton_of("llama")
    mixture = chosen_for((G32[2], G32[4]), 3.5, replace(RULES, quant_lm_head=True))
    assert mixture.schemes["lm_head"] is not None
    assert mixture.mean_bits == mean_bits(skeleton, mixture, head=True) <= 3.5


def test_schemes_that_a_site_cannot_have_are_left_out() -> None:
    wide = Scheme(weight=WeightScheme(bits=2, group_size=64))  # does not divide 96
    mixture = chosen_for((wide, G32[4]), 4.0)
    assert {mixture.schemes[f"model.layers.{block}.mlp.down_proj"] for block in range(3)} == {G32[4]}
    assert wide in mixture.schemes.values()
    assert mixture.costs["model.layers.0.mlp.down_proj"][0] == math.inf
    sites = mixture.to_dict()["sites"]
    assert json.loads(json.dumps(sites))["model.layers.0.mlp.down_proj"]["costs"][0] is None
    assert chosen_for((wide, G32[4]), 3.0, ragged_groups=True).mean_bits <= 3.0


def test_what_formats_refuse_is_left_out() -> None:
    def check(site: Site, scheme: Scheme) -> None:
        if site.name.endswith("v_proj") and scheme.weight.bits == 2:
            raise UserError("no")

    mixture = chosen_for((G32[2], G32[4]), 3.5, check=check)
    attention = {mixture.schemes[f"model.layers.{block}.self_attn.{last}_proj"] for block in range(3) for last in "qkv"}
    assert attention == {G32[4]}


def test_the_record_is_plain() -> None:
    mixture = chosen_for((G32[2], G32[4], None), 3.0)
    record = json.loads(json.dumps(mixture.to_dict()))
    assert record["options"] == ["W2 g32 sym", "W4 g32 sym", "floating point"]
    assert record["mean_bits"] == mixture.mean_bits
    assert record["sites"]["model.layers.0.mlp.up_proj"]["option"] == mixture.chosen["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("options", "avg_bits", "rules", "message"),
    [
        ((G32[2], G32[4]), 2.4, RULES, r"avg_bits 2.4 \(--avg_bits\) cannot be kept: 2.5 is the least that --options give, scales counted"),
        (
            (G32[2], G32[4]),
            3,
            replace(RULES, layer_config={"mlp": G32[8]}),
            r"avg_bits 3 \(--avg_bits\) cannot be kept: 6.\d+ is the least, as --layer_config and --ignore_layers fix 60% of the weights",
        ),
        ((G32[2], G32[4]), math.nan, RULES, r"avg_bits nan \(--avg_bits\) must be a number, such as 3.5"),
        ((G32[4], None), 16, RULES, r"avg_bits 16 \(--avg_bits\) leaves every layer in floating point: there is nothing to quantize"),
        (
            (G32[2], G32[4]),
            3,
            replace(RULES, layer_config={"layers": "W4A16G32"}),
            "nothing is left for --avg_bits to choose; leave it out",
        ),
        (
            (PRESETS["W2A16"], PRESETS["W4A16"]),
            3,
            RULES,
            r"q_proj, model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj: none of the schemes of --options fits",
        ),
    ],
)
def test_what_cannot_be(options: tuple[Scheme | None, ...], avg_bits: float, rules: SchemeRules, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen_for(options, avg_bits, rules)


def test_three_bits_of_the_shipped_model(tiny: Path) -> None:
    """avg_bits 3.0: the mean counts scales, and more options do better."""
    skeleton = skeleton_from(tiny, Checkpoint.open(tiny))
    how = Measurement(tokens=text_rows(tiny)[:4], mask=None, dtype=torch.float32)
    rules = SchemeRules(default=PRESETS["W4A16"])
    two, three = (mixed_schemes(skeleton, rules, parse_options(text), 3.0, how) for text in ("W2A16,W4A16", "W2A16,W3A16,W4A16"))
    assert mean_bits(skeleton, two) <= 3.0
    assert mean_bits(skeleton, three) <= 3.0
    assert three.cost < two.cost
    uniform = sum(costs[1] for costs in three.costs.values())
    assert three.cost < uniform  # of W3A16, which takes 3.125 bits


def test_activations_count_nothing_in_bits() -> None:
    quantized = replace(G32[4], activation=ActivationScheme(bits=8))
    assert option_bits(quantized, (64, 64)) == option_bits(G32[4], (64, 64))
