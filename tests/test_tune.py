"""Tuning one block group: it helps, it is pure, micro-batches and masks change what they should and nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import ARCHITECTURES, chain_of, group_of, host_chain, plain_states, run_all, save_model, values_of
from evenround.blocks import Block
from evenround.calls import BlockCall, embed
from evenround.chains import HOST
from evenround.checkpoint import Checkpoint
from evenround.config import TuneConfig
from evenround.errors import UserError
from evenround.model import Skeleton, skeleton_from
from evenround.numerics.quantized import QuantizedWeight
from evenround.numerics.weights import quantize
from evenround.scheme import PRESETS, Scheme, WeightScheme
from evenround.states import start_values, untuned
from evenround.tune import Draw, GroupResult, Samples, float_outputs, squared_error, step, tune_block

W3 = Scheme(weight=WeightScheme(bits=3, group_size=32))


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Skeleton:
    folder = tmp_path_factory.mktemp("llama")
    save_model(ARCHITECTURES["llama"], folder)
    return skeleton_from(folder, Checkpoint.open(folder))


@pytest.fixture
def two_blocks(skeleton: Skeleton) -> Iterator[tuple[list[Block], torch.Tensor]]:
    """Blocks 0 and 1, materialized, and the inputs of block 0."""
    tokens = torch.randint(3, 128, (12, 16), generator=torch.Generator().manual_seed(5))
    embedded = embed(skeleton, tokens, None, torch.float32, host_chain)
    names = list(skeleton.block_names[:2])
    with skeleton.materialized(names, torch.float32):
        yield [make_block(skeleton, number, embedded.calls[number]) for number in range(2)], values_of(embedded.hidden)


def make_block(skeleton: Skeleton, number: int, call: object, scheme: Scheme = W3) -> Block:
    sites = tuple((site, scheme) for site in skeleton.sites if site.block == number)
    return Block(skeleton.block_names[number], skeleton.block(number), call, sites)  # type: ignore[arg-type]


def tune_towards(
    blocks: list[Block], hidden: torch.Tensor, targets: torch.Tensor, config: TuneConfig, mask: torch.Tensor | None = None
) -> tuple[GroupResult, torch.Tensor]:
    """What tuning gives, and the outputs of the quantized blocks."""
    draw = Draw(len(hidden), config.batch_size * config.gradient_accumulate_steps, torch.Generator().manual_seed(1))
    outputs = host_chain(hidden.shape)
    with group_of(blocks, config.batch_size) as group:
        seen = float_outputs(group, chain_of(hidden), None, config, mask)
        result = tune_block(group, Samples(chain_of(hidden), chain_of(targets), mask), config, draw, seen=seen, outputs=outputs)
    return result, values_of(outputs)


def tune(blocks: list[Block], hidden: torch.Tensor, config: TuneConfig, mask: torch.Tensor | None = None) -> GroupResult:
    return tune_towards(blocks, hidden, run_all(blocks, hidden, 4), config, mask)[0]


def round_to_nearest(blocks: list[Block]) -> dict[str, QuantizedWeight]:
    with group_of(blocks, 4) as group:
        return untuned(group, start_values(group, TuneConfig(), {}), HOST)


def gradients_of(
    block: Block, samples: Samples, chosen: list[int], micro_batch: int
) -> tuple[float, dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Loss of the untuned block, and for each site the gradients of V and of the clips."""
    with group_of([block], micro_batch) as group:
        states = plain_states(group)
        loss, pending = step(group, states, samples, chosen)
    assert [site.state for site in pending] == states
    return loss, {site.state.site.name: site.state.gradients(site.total(HOST), clips=True) for site in pending}  # type: ignore[misc]


CONFIG = TuneConfig(iters=25, batch_size=4)


def test_tuning_helps_and_leaves_the_block_as_it_was(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    before = {name: value.clone() for name, value in block.module.state_dict().items()}
    result = tune([block], hidden, CONFIG)
    assert result.kept == "tuned" and result.tuned_loss is not None and result.tuned_loss < 0.8 * result.rtn_loss
    assert len(result.losses) == 25 and result.best_iteration is not None
    after = block.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in block.module.parameters())


def test_losses_and_outputs_are_those_of_the_weights_given_back(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    targets = run_all([block], hidden, 4)
    result, outputs = tune_towards([block], hidden, targets, CONFIG)
    weights = {name: weight.dequantize() for name, weight in result.quantized.items()}
    assert torch.equal(outputs, run_all([block], hidden, 4, weights))
    assert result.tuned_loss == pytest.approx(float((outputs - targets).square().mean()), rel=1e-5)
    plain = run_all([block], hidden, 4, {name: weight.dequantize() for name, weight in round_to_nearest([block]).items()})
    assert result.rtn_loss == pytest.approx(float((plain - targets).square().mean()), rel=1e-5)


def test_the_same_seed_gives_the_same_codes(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    first, second = tune([block], hidden, CONFIG), tune([block], hidden, CONFIG)
    for name, weight in first.quantized.items():
        assert torch.equal(weight.codes, second.quantized[name].codes) and torch.equal(weight.scale, second.quantized[name].scale)
    assert first.losses == second.losses


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_micro_batches_do_not_change_the_gradient(two_blocks: tuple[list[Block], torch.Tensor], micro: int) -> None:
    (block, _), hidden = two_blocks
    mask = torch.ones(12, 16, dtype=torch.bool)
    mask[2, 5:] = False
    samples = Samples(chain_of(hidden), chain_of(run_all([block], hidden, 4)), mask)
    chosen = [2, 0, 7, 5, 11, 3, 1, 9]
    whole_loss, whole = gradients_of(block, samples, chosen, 8)
    parts_loss, parts = gradients_of(block, samples, chosen, micro)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-5)
    assert list(whole) == list(parts) == [site.name for site, _ in block.sites]
    for name, gradients in whole.items():
        for a, b in zip(gradients, parts[name], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * float(a.abs().max()) + 1e-12)


def test_one_step_moves_every_parameter_by_its_step_size(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    """One iteration, last iterate kept: V = -lr * sign(gradient), clips = 1 - lr * sign(gradient) clamped to 1, computed here by hand."""
    (block, _), hidden = two_blocks
    config = TuneConfig(iters=1, batch_size=12, lr=0.02, minmax_lr=0.01, keep="last")
    result = tune([block], hidden, config)
    assert result.kept == "tuned"
    samples = Samples(chain_of(hidden), chain_of(run_all([block], hidden, 4)), None)
    _, gradients = gradients_of(block, samples, list(range(12)), 12)
    for site, _ in block.sites:
        offset, low, high = gradients[site.name]
        offset = -0.02 * torch.sign(offset)
        low, high = (1 - 0.01 * torch.sign(clip) for clip in (low, high))
        expected = quantize(block.weight(site), W3.weight, offset, (low.clamp(0, 1), high.clamp(0, 1)))
        found = result.quantized[site.name]
        assert torch.equal(found.codes, expected.codes) and torch.equal(found.scale, expected.scale)


def test_padded_tokens_change_nothing(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    mask = torch.ones(12, 16, dtype=torch.bool)
    mask[:, 12:] = False
    first = tune([block], hidden, CONFIG, mask)
    spoiled = hidden.clone()
    spoiled[:, 12:] *= 7  # causal attention: earlier tokens do not see these
    second = tune([block], spoiled, CONFIG, mask)
    assert first.rtn_loss == pytest.approx(second.rtn_loss, rel=1e-4)
    assert first.losses[0] == pytest.approx(second.losses[0], rel=1e-4)


def test_the_loss_counts_valid_tokens_only() -> None:
    output, target = torch.ones(2, 4, 8), torch.zeros(2, 4, 8)
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    assert float(squared_error(output, target, mask)) == 5 * 8
    samples = Samples(chain_of(output), chain_of(target), mask)
    assert samples.counted() == 5 and samples.counted([1]) == 1


def test_two_blocks_tuned_together_look_at_the_last_output(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    blocks, hidden = two_blocks
    joint = tune(blocks, hidden, CONFIG)
    alone = tune(blocks[:1], hidden, CONFIG)
    assert set(joint.quantized) == {site.name for block in blocks for site, _ in block.sites}
    assert joint.tuned_loss is not None and joint.tuned_loss < joint.rtn_loss
    name = blocks[0].sites[0][0].name
    assert not torch.equal(joint.quantized[name].codes, alone.quantized[name].codes)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.002},
        {"minmax_lr": 0.001},
        {"momentum": 0.8},
        {"minmax_tuning": False},
        {"keep": "last"},
        {"batch_size": 2},
        {"gradient_accumulate_steps": 2},
        {"iters": 10},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_changes_the_result(two_blocks: tuple[list[Block], torch.Tensor], change: dict[str, object]) -> None:
    (block, _), hidden = two_blocks
    base, other = tune([block], hidden, CONFIG), tune([block], hidden, replace(CONFIG, **change))
    same = [
        torch.equal(weight.codes, other.quantized[name].codes) and torch.equal(weight.scale, other.quantized[name].scale)
        for name, weight in base.quantized.items()
    ]
    assert not all(same)


def test_without_clip_tuning_scales_are_the_untuned_ones(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    result, plain = tune([block], hidden, replace(CONFIG, minmax_tuning=False)), round_to_nearest([block])
    assert all(torch.equal(result.quantized[name].scale, plain[name].scale) for name in plain)


def test_the_untuned_rounding_is_kept_when_tuning_does_not_help(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    config = TuneConfig(iters=2, batch_size=4, lr=5.0, minmax_lr=0.5, keep="last")
    result, outputs = tune_towards([block], hidden, run_all([block], hidden, 4), config)
    assert result.kept == "untuned" and "did not help model.layers.0" in result.notes[0]
    plain = round_to_nearest([block])
    assert all(torch.equal(result.quantized[name].codes, plain[name].codes) for name in plain)
    weights = {name: weight.dequantize() for name, weight in plain.items()}
    assert torch.equal(outputs, run_all([block], hidden, 4, weights))


def test_zero_iterations_round_to_nearest(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    result, outputs = tune_towards([block], hidden, run_all([block], hidden, 4), TuneConfig(iters=0))
    assert (result.kept, result.tuned_loss, result.losses) == ("untuned", None, ())
    weights = {name: weight.dequantize() for name, weight in round_to_nearest([block]).items()}
    assert torch.equal(outputs, run_all([block], hidden, 8, weights))


def test_asymmetric_and_other_groups_tune_too(skeleton: Skeleton, two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    for scheme in (
        WeightScheme(bits=2, group_size=32, symmetric=False),
        WeightScheme(bits=4, group_size=-1),
        WeightScheme(bits=4, group_size=0),
    ):
        other = make_block(skeleton, 0, block.call, Scheme(weight=scheme))
        result = tune([other], hidden, CONFIG)
        assert result.tuned_loss is not None and result.tuned_loss < result.rtn_loss, scheme


def test_a_ragged_last_group_tunes(skeleton: Skeleton, two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    result = tune([make_block(skeleton, 0, block.call, Scheme(weight=WeightScheme(bits=3, group_size=48)))], hidden, CONFIG)
    assert result.tuned_loss is not None and result.tuned_loss < result.rtn_loss
    assert result.quantized["model.layers.0.self_attn.q_proj"].scale.shape == (64, 2)


def test_not_finite_inputs_name_the_block(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    targets, spoiled = run_all([block], hidden, 4), hidden.clone()
    spoiled[4, 3, 2] = float("inf")
    message = r"the input of model\.layers\.0 for calibration sample 4 is NaN or infinite in torch\.float32: try --compute_dtype float32"
    with pytest.raises(UserError, match=message):
        run_all([block], spoiled, 4)
    with pytest.raises(UserError, match=message):
        tune_towards([block], spoiled, targets, CONFIG)


def test_float_outputs_that_are_not_finite_name_the_block(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    block.module.get_parameter("mlp.down_proj.weight").data.fill_(3e38)
    hidden[:5] = 0  # and so are their outputs
    message = r"the float output of model\.layers\.0 for calibration sample 5 is NaN or infinite in torch\.float32: try --compute_dtype"
    with pytest.raises(UserError, match=message):
        run_all([block], hidden, 4)


def test_a_loss_that_is_not_finite_keeps_the_untuned_rounding(two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    targets = run_all([block], hidden, 4)
    targets[:, 0] = 1e30  # finite, its square is not
    result, outputs = tune_towards([block], hidden, targets, CONFIG)
    assert result.kept == "untuned" and "loss inf at iteration 0" in result.notes[0]
    plain = round_to_nearest([block])
    assert all(torch.equal(result.quantized[name].codes, plain[name].codes) for name in plain)
    weights = {name: weight.dequantize() for name, weight in plain.items()}
    assert torch.equal(outputs, run_all([block], hidden, 4, weights))


def test_a_scale_too_large_for_float16_names_the_layer(skeleton: Skeleton, tmp_path: Path) -> None:
    with skeleton.materialized(["model.layers.0"], torch.float32):
        block = make_block(skeleton, 0, BlockCall((), {}, None, False))
        block.module.get_parameter("mlp.up_proj.weight").mul_(1e8)
        with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj: a scale of magnitude .* does not fit float16; leave it out"):
            round_to_nearest([block])


def test_layers_with_four_bit_inputs_move_further_and_no_others(skeleton: Skeleton, two_blocks: tuple[list[Block], torch.Tensor]) -> None:
    (block, _), hidden = two_blocks
    for name, further in (("MXFP4", True), ("MXFP8", False), ("MXFP4A16", False)):
        other = make_block(skeleton, 0, block.call, PRESETS[name])
        once, twice = (tune([other], hidden, replace(CONFIG, coarse_inputs=factor, keep="last")) for factor in (1.0, 2.0))
        assert further != all(torch.equal(weight.codes, twice.quantized[site].codes) for site, weight in once.quantized.items()), name
