"""Rehearsals: no weight is read, nothing is left behind, and two rounds of a loop are enough."""

from dataclasses import replace

import pytest
import torch

from evenround.checkpoint import Checkpoint
from evenround.layouts import Wish
from evenround.memory.place import Layout
from evenround.rehearsal import profile, rehearse
from small_jobs import TUNE, Small, drafted


def single(micro_batch: int, **changes: object) -> Layout:
    layout = Layout(strategy="single", replicas=({"": 0},), owners={}, micro_batch=micro_batch, chains="host")
    return replace(layout, **changes)  # type: ignore[arg-type]


def test_no_weight_is_read_and_the_skeleton_is_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, name: str) -> None:
        raise AssertionError(f"{name} was read")

    small = Small()
    group = small.rehearsed()
    monkeypatch.setattr(Checkpoint, "read", refuse)
    assert rehearse(group, single(2), 1).peaks[0] > 0 and profile(group).weights
    assert all(parameter.is_meta for parameter in small.skeleton.block(0).parameters())
    modules = list(small.skeleton.model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_the_number_of_samples_and_steps_counts_only_in_the_chains() -> None:
    """Ten times the text, ten times the steps: a rehearsal takes two rounds of each, and so much memory does a run."""
    few, many = Small(samples=9), Small(samples=90, tune=replace(TUNE, iters=500))
    assert rehearse(few.rehearsed(), single(3), 1) == rehearse(many.rehearsed(), single(3), 1)
    rows = [rehearse(small.rehearsed(), single(3, chains="device", chain_rows=(small.samples,)), 1).peaks[0] for small in (few, many)]
    assert rows[1] - rows[0] == 3 * 81 * 12 * 64 * 4


def test_chains_on_disk_take_what_chains_on_the_host_take() -> None:
    group = Small().rehearsed()
    assert rehearse(group, single(2, chains="disk"), 1) == rehearse(group, single(2), 1)


def test_fewer_samples_at_once_and_recomputation_take_less() -> None:
    group = Small(seqlen=48, samples=8, tune=replace(TUNE, batch_size=8, nblocks=3)).rehearsed()
    peaks = [rehearse(group, single(size), 1).peaks[0] for size in (8, 4, 2, 1)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
    assert rehearse(group, single(8, recompute=True), 1).peaks[0] < peaks[0]


def test_attention_that_keeps_its_scores_takes_more_by_the_scores() -> None:
    group = Small(seqlen=60).rehearsed()
    fused, math = (rehearse(replace(group, attention=kind), single(3), 1) for kind in ("fused", "math"))  # type: ignore[arg-type]
    assert math.peaks[0] - fused.peaks[0] >= 3 * 4 * 60 * 60 * 4  # samples, heads, tokens², float32
    assert math.breakdowns[0]["saved activations"] - fused.breakdowns[0]["saved activations"] >= 3 * 4 * 60 * 60 * 4


def test_a_module_that_uses_the_weight_of_one_elsewhere_cannot_be_cut_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a parameter of its child itself: hooks cannot know."""
    small = Small()
    group = small.rehearsed()
    mlp = small.skeleton.block(0).mlp  # type: ignore[union-attr]

    def behind(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, mlp.up_proj.weight)[..., :64]  # type: ignore[union-attr]

    monkeypatch.setattr(mlp, "forward", behind)
    name = "model.layers.0.mlp.up_proj"
    assert rehearse(group, single(2), 1).peaks[0] > 0
    with pytest.raises(RuntimeError, match="same device"):
        rehearse(group, single(2, replicas=({"": 0, name: 1},)), 2)


def test_what_a_rehearsal_takes_depends_on_nothing_that_was_rehearsed_before() -> None:
    group = Small(architecture="gemma2").rehearsed()
    layout = drafted(group, Wish(strategy="split", micro_batch=2), 2)
    first = rehearse(group, layout, 2)
    rehearse(group, single(3), 1)
    assert rehearse(group, layout, 2) == first


def test_a_step_of_the_profile_is_a_part_of_what_a_rehearsal_finds() -> None:
    """One sample more at once takes what the profile says that a sample keeps, up to what is alive for a moment."""
    group = Small(seqlen=60, samples=8, tune=replace(TUNE, batch_size=8, nblocks=2)).rehearsed()
    kept = sum(profile(group).kept.values())
    four, eight = (rehearse(group, single(size), 1).peaks[0] for size in (4, 8))
    assert (eight - four) / 4 == pytest.approx(kept, rel=0.35)
