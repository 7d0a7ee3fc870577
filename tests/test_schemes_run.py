"""Every scheme from end to end of a block group: memory as planned, the same bytes on any number of devices, and tuning helps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import ARCHITECTURES, chain_of, group_of, host_chain
from evenround.config import DeviceConfig, TuneConfig
from evenround.layouts import Wish
from evenround.memory.place import Layout
from evenround.rehearsal import rehearse
from evenround.tune import Draw, GroupResult, Samples, float_outputs, tune_block
from small_jobs import GIB, SCHEMES, TUNE, TWO_BLOCKS, Measured, Small, drafted, measured, same_weight, simulated
from test_plan import assert_exact, way

# ---------------------------------------------------------------------------------------------------------------------------------------
# Memory

WAYS = (
    "single",
    "share",
    "split",
    "pipeline",
    "greedy",
    "single, inputs on the host",
    "single, state on the host",
    "single, recompute",
    "output_device cpu",
)
Case = tuple[str, bool, int, str, str, bool]
"""(scheme, scales searched, iterations, way to run, architecture, padded)."""

COVER: list[Case] = [
    ("MXFP4", True, 0, "single", "llama", True),
    ("MXFP4", False, 2, "split", "gpt2", False),
    ("MXFP8", True, 2, "share", "llama", True),
    ("MXFP8", False, 0, "single", "llama", False),
    ("NVFP4", True, 2, "pipeline", "llama", False),
    ("NVFP4", False, 0, "greedy", "gemma2", True),
    ("FP8_STATIC", False, 2, "share", "gpt2", True),
    ("FP8_STATIC", True, 0, "split", "llama", False),
    ("FP8_DYNAMIC", False, 2, "single, recompute", "qwen3", True),
    ("FP8_TILES", False, 2, "single, state on the host", "llama", False),
    ("FP8_TILES", True, 2, "pipeline", "llama", True),
    ("INT8", True, 2, "output_device cpu", "llama", False),
    ("INT4", True, 0, "single, inputs on the host", "opt", True),
    ("INT4", False, 2, "greedy", "llama", False),
    ("MXINT4", True, 2, "single, inputs on the host", "bloom", True),
    ("MXINT4", True, 0, "share", "llama", False),
    ("W4A16_ASYM", True, 2, "single, state on the host", "llama", True),
]
PRODUCT: list[Case] = [
    (scheme, search, iters, name, list(ARCHITECTURES)[(at + number) % len(ARCHITECTURES)], bool((at + number) % 2))
    for at, scheme in enumerate(SCHEMES)
    for search in (False, True)
    for iters in (0, 2)
    for number, name in enumerate(WAYS)
]


def small_of(case: Case, head: bool = False) -> Small:
    scheme, search, iters, _, architecture, padded = case
    tune = replace(TUNE, iters=iters, search_scales=search)
    return Small(architecture=architecture, scheme=scheme, tune=tune, padded=padded, head=head)


def check_memory(case: Case, folder: Path) -> Measured:
    small = small_of(case)
    if small.runs_text:
        small, layout, usage, count = way(case[3], small)
        return assert_exact(small, layout, usage, count, folder)
    plan, names = small.plan(simulated([GIB])), small.jobs()[0].names
    return assert_exact(small, plan.layout(names), plan.usage(names), 1)


def test_the_default_selection_leaves_out_no_scheme_way_or_setting() -> None:
    for at, values in enumerate((SCHEMES, (False, True), (0, 2), WAYS)):
        assert {case[at] for case in COVER} == set(values)
    assert {case[5] for case in COVER} == {False, True}


@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(map(str, case)))
def test_a_run_of_any_scheme_takes_the_bytes_of_the_plan(case: Case, tmp_path: Path) -> None:
    run = check_memory(case, tmp_path)
    calibrated = case[0] in ("NVFP4", "FP8_STATIC")
    assert (run.result is not None) == small_of(case).runs_text
    assert all((weight.input_scale is not None) == calibrated for weight in run.quantized.values())
    assert all((weight.global_scale is not None) == (case[0] == "NVFP4") for weight in run.quantized.values())


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case for case in PRODUCT if case not in COVER], ids=lambda case: "-".join(map(str, case)))
def test_every_way_of_every_scheme_takes_the_bytes_of_the_plan(case: Case, tmp_path: Path) -> None:
    check_memory(case, tmp_path)


def check_head(scheme: str, search: bool, iters: int, placement: str, architecture: str, padded: bool) -> None:
    small = small_of((scheme, search, iters, "", architecture, padded), head=True)
    if not small.runs_text:
        placement = "auto"
    plan = small.plan(simulated([GIB, GIB]), DeviceConfig(placement=placement))
    number = len(small.jobs()) - 1
    names = small.jobs()[number].names
    assert names == (small.skeleton.sites[-1].name,)
    assert assert_exact(small, plan.layout(names), plan.usage(names), 2, number=number).quantized.keys() == set(names)


@pytest.mark.parametrize(
    "case",
    [("MXFP4", True, 2, "single"), ("NVFP4", True, 0, "share"), ("FP8_STATIC", False, 2, "share"), ("FP8_STATIC", False, 0, "single")],
    ids=lambda case: "-".join(map(str, case)),
)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_the_output_head_in_any_scheme_takes_the_bytes_of_the_plan(case: tuple[str, bool, int, str], padded: bool) -> None:
    check_head(*case, "llama", padded)


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gpt2"])
@pytest.mark.parametrize("placement", ["single", "share"])
@pytest.mark.parametrize("iters", [0, 2])
@pytest.mark.parametrize("search", [False, True], ids=["plain", "searched"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_output_head_takes_the_bytes_of_the_plan(scheme: str, search: bool, iters: int, placement: str, architecture: str) -> None:
    check_head(scheme, search, iters, placement, architecture, padded=iters == 2)


@pytest.mark.parametrize("scheme", ["NVFP4", "FP8_STATIC", "MXFP4"])
def test_the_number_of_samples_counts_only_in_the_chains(scheme: str) -> None:
    """What is seen of inputs takes the same memory for any number of them."""
    tune = replace(TUNE, search_scales=True)
    few, many = Small(scheme=scheme, samples=9, tune=tune), Small(scheme=scheme, samples=90, tune=replace(tune, iters=500))
    layout = Layout(strategy="single", replicas=({"": 0},), owners={}, micro_batch=3, chains="host")
    assert rehearse(few.rehearsed(), layout, 1) == rehearse(many.rehearsed(), layout, 1)


# ---------------------------------------------------------------------------------------------------------------------------------------
# The same bytes on any number of devices

ONE = Layout(strategy="single", replicas=({"": 0},), owners={}, micro_batch=1, chains="host")


@pytest.mark.parametrize("scheme", ["MXFP4", "NVFP4", "FP8_STATIC"])
def test_one_device_and_several_give_the_same_bytes(scheme: str) -> None:
    small = Small(scheme=scheme, samples=3, padded=True, tune=replace(TWO_BLOCKS, search_scales=True, clip_limit=2.0))
    alone = measured(small, ONE, [GIB])
    assert len(alone.quantized) == 14 and alone.result is not None
    wishes = {
        "split": Wish(strategy="split", micro_batch=1),
        "pipeline": Wish(strategy="pipeline", micro_batch=1, in_flight=3),
    }
    for name, wish in wishes.items():
        layout = drafted(small.rehearsed(), wish, 2)
        assert layout.order == ONE.order and {number for number in layout.replicas[0].values()} == {0, 1}
        assert measured(small, layout, [GIB] * 2).same_bytes(alone), name


@pytest.mark.parametrize("scheme", ["MXFP4", "NVFP4", "FP8_STATIC"])
def test_activations_computed_again_state_on_the_host_and_fused_layers_apart_give_the_same_bytes(scheme: str) -> None:
    small = Small(scheme=scheme, samples=3, tune=replace(TUNE, search_scales=True))
    alone = measured(small, ONE, [GIB])
    for change in (Wish(strategy="single", micro_batch=1, recompute=True), Wish(strategy="single", micro_batch=1, state_on_host=True)):
        assert measured(small, drafted(small.rehearsed(), change, 1), [GIB]).same_bytes(alone)
    apart = replace(ONE, replicas=({"": 0, "model.layers.0.self_attn.v_proj": 1, "model.layers.0.mlp.up_proj": 1},))
    assert measured(small, apart, [GIB] * 2).same_bytes(alone)


def test_bytes_that_differ_are_told_apart() -> None:
    small = Small(scheme="NVFP4", samples=2)
    one, other = measured(small, ONE, [GIB]), measured(replace(small, tune=replace(TUNE, iters=3)), ONE, [GIB])
    assert one.same_bytes(one) and not one.same_bytes(other)
    weight = next(iter(one.quantized.values()))
    assert weight.input_scale is not None and weight.global_scale is not None
    assert not same_weight(weight, replace(weight, input_scale=weight.input_scale * 2))
    assert not same_weight(weight, replace(weight, global_scale=weight.global_scale * 2))
    assert not same_weight(weight, replace(weight, input_scale=None))


# ---------------------------------------------------------------------------------------------------------------------------------------
# What tuning does

LONGER = TuneConfig(
    iters=20, batch_size=4, lr=0.01, minmax_lr=0.005, momentum=0.8, keep="last", search_scales=True, clip_limit=2.0
)  # the default recipe, shorter


def tuned(small: Small) -> GroupResult:
    """Block 0 on the host, without simulation."""
    job = replace(small, tune=replace(small.tune, iters=1)).jobs()[0]  # which has the calls of a run over text
    hidden = torch.randn(small.samples, small.seqlen, 64, generator=torch.Generator().manual_seed(0))
    targets = host_chain(hidden.shape)
    draw = Draw(small.samples, small.tune.batch_size, torch.Generator().manual_seed(1))
    with job.skeleton.materialized(job.names, job.dtype), group_of(job.blocks(), 4) as group:
        seen = float_outputs(group, chain_of(hidden), targets, small.tune)
        return tune_block(group, Samples(chain_of(hidden), targets, None), small.tune, draw, seen=seen)


@pytest.mark.parametrize("search", [False, True], ids=["plain", "searched"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tuning_helps(scheme: str, search: bool) -> None:
    result = tuned(Small(scheme=scheme, samples=12, seqlen=16, tune=replace(LONGER, search_scales=search)))
    assert result.kept == "tuned" and result.tuned_loss is not None and result.tuned_loss < result.rtn_loss
    assert result.best_iteration == 20 and len(result.losses) == 20


@pytest.mark.parametrize("scheme", ["MXFP4", "MXFP8", "NVFP4", "INT4", "MXINT4", "W4A16_ASYM"])
def test_searched_scales_change_the_result_and_round_better(scheme: str) -> None:
    small = Small(scheme=scheme, samples=12, seqlen=16, tune=replace(LONGER, iters=0))
    plain, searched = tuned(replace(small, tune=replace(small.tune, search_scales=False))), tuned(small)
    assert not all(same_weight(weight, searched.quantized[name]) for name, weight in plain.quantized.items())
    assert searched.rtn_loss < plain.rtn_loss


@pytest.mark.parametrize("scheme", ["FP8_STATIC", "FP8_DYNAMIC", "FP8_TILES", "INT8"])
def test_schemes_without_a_search_do_not_change(scheme: str) -> None:
    small = Small(scheme=scheme, samples=4, tune=replace(LONGER, iters=2))
    plain, searched = tuned(replace(small, tune=replace(small.tune, search_scales=False))), tuned(small)
    assert all(same_weight(weight, searched.quantized[name]) for name, weight in plain.quantized.items())


@pytest.mark.parametrize("scheme", ["MXFP4", "NVFP4", "INT4", "MXINT4", "W4A16_ASYM", "FP8_DYNAMIC"])
def test_wider_clips_change_the_result(scheme: str) -> None:
    small = Small(
        scheme=scheme, samples=8, tune=replace(LONGER, iters=12, minmax_lr=0.015 if scheme == "NVFP4" else 0.005)
    )  # E4M3 scales are coarse
    narrow, wide = tuned(replace(small, tune=replace(small.tune, clip_limit=1.0))), tuned(small)
    assert narrow.kept == wide.kept == "tuned"
    assert not all(same_weight(weight, wide.quantized[name]) for name, weight in narrow.quantized.items())
