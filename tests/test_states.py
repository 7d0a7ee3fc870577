"""What is known of a site before it is tuned and what enters it: seen exactly, shared where servers fuse, quantized where they quantize."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from conftest import chain_of, group_of, host_chain, run_all, values_of
from evenround.blocks import Block, Group, on_devices
from evenround.calls import BlockCall
from evenround.chains import HOST
from evenround.config import TuneConfig
from evenround.memory.place import Layout, Placement
from evenround.model import Site
from evenround.numerics.activations import fake_quantize
from evenround.scheme import Scheme, WeightScheme
from evenround.states import Seen, Watch, made_up_inputs, needs_text, quantized_inputs, start_values, untuned, watched
from evenround.tune import Draw, Samples, float_outputs, initial_states, micro_batch_error, step, tune_block
from reference_floats import nv_global
from small_jobs import GIB, SCHEMES, TUNE, Measured, Small, measured

SEARCH = TuneConfig(search_scales=True)
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


@contextmanager
def block_of(small: Small, number: int = 0) -> Iterator[Block]:
    """Group `number`, of one block or the head, materialized on the host."""
    job = small.jobs()[number]
    with job.skeleton.materialized(job.names, job.dtype):
        (block,) = job.blocks()
        yield block


def hidden_of(small: Small, seed: int = 0) -> Tensor:
    return torch.randn(small.samples, small.seqlen, 64, generator=torch.Generator().manual_seed(seed))


def modules_of(block: Block) -> dict[str, nn.Module]:
    """Site → module."""
    return {site.name: block.module.get_submodule(site.name.removeprefix(block.name).removeprefix(".")) for site, _ in block.sites}


def hooks_of(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())


@contextmanager
def recorded(block: Block) -> Iterator[dict[str, list[Tensor]]]:
    """Site → what enters it at each call, by hooks of our own."""
    found: dict[str, list[Tensor]] = {name: [] for name in modules_of(block)}
    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: found[name].append(args[0].detach().clone()))  # type: ignore[misc]
        for name, module in modules_of(block).items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------------------------------------------------------------------------
# Watch


def slowly_seen(values: Sequence[Tensor], mask: Tensor | None, size: int) -> tuple[float, Tensor]:
    """Largest magnitude, and the moments `[squares, size, size]` in float64, token after token."""
    tokens = torch.cat([part.reshape(-1, part.shape[-1]) for part in values])
    squares = torch.zeros(-(-tokens.shape[1] // size), size, size, dtype=torch.float64)
    counts = [True] * len(tokens) if mask is None else mask.flatten().tolist()
    assert len(counts) == len(tokens)
    largest = 0.0
    for token, counted in zip(tokens, counts, strict=True):
        if not counted:
            continue
        largest = max(largest, float(token.abs().max()))
        for number, part in enumerate(token.double().split(size)):
            squares[number, : len(part), : len(part)] += torch.outer(part, part)
    return largest, squares


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt", "bloom"])
def test_a_watch_sees_what_a_loop_over_tokens_sees(architecture: str, padded: bool) -> None:
    small = Small(architecture=architecture, scheme="NVFP4", padded=padded, samples=5)
    with block_of(small) as block, recorded(block) as entered:
        with group_of([block], 2) as group:
            seen = float_outputs(group, chain_of(hidden_of(small)), None, SEARCH, small.mask)
        assert seen.keys() == entered.keys() == {site.name for site, _ in block.sites}
        for name, what in seen.items():
            largest, squares = slowly_seen(entered[name], small.mask, 16)
            assert float(what.magnitude) == largest and what.moments is not None
            assert what.moments.shape == squares.shape
            torch.testing.assert_close(what.moments.double(), squares, rtol=1e-5, atol=1e-5)


def test_masked_tokens_may_be_anything() -> None:
    small = Small(scheme="NVFP4", padded=True)
    spoiled = torch.where(small.mask.unsqueeze(-1), hidden_of(small), 1000 * hidden_of(small, 1))  # type: ignore[union-attr]
    with block_of(small) as block, group_of([block], 3) as group:
        seen = [float_outputs(group, chain_of(hidden), None, SEARCH, small.mask) for hidden in (hidden_of(small), spoiled)]
    for name, what in seen[0].items():
        other = seen[1][name]
        torch.testing.assert_close(other.magnitude, what.magnitude)
        torch.testing.assert_close(other.moments, what.moments, rtol=1e-4, atol=1e-4)


def test_what_replicas_see_adds_up() -> None:
    small = Small(scheme="NVFP4", padded=True)
    layout = Layout(strategy="share", replicas=({"": 0}, {"": 1}), owners={}, micro_batch=2, chains="host")
    hidden = hidden_of(small)
    hidden[3] *= 9  # the largest is in the share of the second
    with block_of(small) as block:
        with group_of([block], 2) as group:
            alone = float_outputs(group, chain_of(hidden), None, SEARCH, small.mask)
        with on_devices([block], Placement(layout, [HOST, torch.device("cpu", 0)])) as group:
            together = float_outputs(group, chain_of(hidden), None, SEARCH, small.mask)
    assert alone.keys() == together.keys()
    for name, what in alone.items():
        assert torch.equal(together[name].magnitude, what.magnitude) and together[name].magnitude.device == HOST
        torch.testing.assert_close(together[name].moments, what.moments, rtol=1e-5, atol=1e-4)


def test_only_sites_that_need_it_are_watched() -> None:
    plain = TuneConfig()
    for scheme, searches, calibrates in (
        ("W4A16", True, False), ("MXFP4", True, False), ("NVFP4", True, True), ("FP8_STATIC", False, True), ("FP8_DYNAMIC", False, False),
        ("INT8", False, False), ("INT4", True, False),
    ):  # fmt: skip
        (found,) = {scheme for scheme in Small(scheme=scheme).schemes.values() if scheme is not None}
        assert watched(found, plain) == calibrates and watched(found, SEARCH) == (searches or calibrates), scheme
        assert needs_text([None, found], replace(plain, iters=0)) == calibrates
        assert needs_text([None, found], plain) and not needs_text([None], replace(SEARCH, iters=0))
        with block_of(Small(scheme=scheme)) as block, group_of([block], 2) as group:
            assert bool(made_up_inputs(group, SEARCH)) == (searches or calibrates)
            assert all((seen.moments is not None) == searches for seen in made_up_inputs(group, SEARCH).values())
            assert not any(seen.moments is not None for seen in made_up_inputs(group, plain).values())


def test_tokens_that_an_expert_was_sent_are_seen_without_a_mask() -> None:
    """They lie in no order that a mask knows."""
    seen, mask = Seen(torch.zeros(1), torch.zeros(1, 4, 4)), torch.tensor([[True, False], [True, True]])
    seen.see(torch.full((3, 4), 2.0), mask)
    assert float(seen.magnitude) == 2 and float(seen.moments[0, 0, 0]) == 12  # type: ignore[index]
    seen.see(torch.full((2, 2, 4), 3.0), mask)
    assert float(seen.magnitude) == 3 and float(seen.moments[0, 0, 0]) == 12 + 27  # type: ignore[index]


def test_a_watch_is_empty_when_it_has_told() -> None:
    with block_of(Small(scheme="NVFP4")) as block, group_of([block], 2) as group:
        watch = Watch(group, SEARCH)
        assert watch.total() and not watch.replicas[0]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Scales from calibration


def linear(width: int, scheme: WeightScheme, out: int = 3) -> Block:
    """A block that is one layer."""
    module = nn.Linear(width, out, bias=False)
    module.weight.data = torch.randn(out, width, generator=torch.Generator().manual_seed(4))
    site = Site(
        name="layer", checkpoint_name="layer.weight", shape=(out, width), transposed=False, block=0, is_head=False,
        dtype=torch.float32, has_bias=False,
    )  # fmt: skip
    return Block("layer", module, BlockCall((), {}, None, False), ((site, Scheme(weight=scheme)),))


@pytest.mark.parametrize("width", [200, 384, 300])
def test_groups_wider_than_a_square_are_searched_also_where_the_last_is_short(width: int) -> None:
    block = linear(width, WeightScheme(bits=2, group_size=192))
    inputs = torch.randn(4, 50, width, generator=torch.Generator().manual_seed(1)) * (1 + 5 * (torch.arange(width) % 7 == 0))
    with group_of([block], 2) as group, torch.no_grad():
        seen = float_outputs(group, chain_of(inputs), None, SEARCH)
        errors = []
        for config in (TuneConfig(), SEARCH):
            (weight,) = untuned(group, start_values(group, config, seen), HOST).values()
            errors.append(float((inputs @ (weight.dequantize() - block.module.weight).t()).square().sum()))  # type: ignore[operator]
    assert errors[1] < errors[0]


def static_scales(run: Measured) -> dict[str, float]:
    return {name: float(weight.input_scale) for name, weight in run.quantized.items()}  # type: ignore[arg-type]


SINGLE = Layout(strategy="single", replicas=({"": 0},), owners={}, micro_batch=2, chains="host")


def test_a_static_scale_is_that_of_all_samples_whatever_iterate_is_kept() -> None:
    """Were it the last mini-batch's, or moved by tuning, one iteration would give another than five."""
    small = Small(scheme="FP8_STATIC", tune=replace(TUNE, search_scales=True))
    runs = [
        measured(replace(small, tune=replace(small.tune, iters=iters, keep=keep, batch_size=size)), SINGLE, [GIB])
        for iters, keep, size in ((0, "last", 3), (1, "last", 1), (1, "best", 2), (5, "last", 3), (5, "best", 3))
    ]
    found = [static_scales(run) for run in runs]
    assert all(scales == found[0] for scales in found)
    inputs = torch.randn(small.shape, generator=torch.Generator().manual_seed(0))  # as `measured` makes them
    with block_of(small) as block, recorded(block) as entered:
        run_all([block], inputs, 2)
        assert found[0].keys() == entered.keys()
        for name, scale in found[0].items():
            largest = torch.cat(entered[name]).abs().amax()
            assert len(torch.cat(entered[name])) == small.samples and scale == float(largest / 448)


def test_a_static_scale_does_not_depend_on_devices() -> None:
    small = Small(scheme="FP8_STATIC")
    share = replace(SINGLE, strategy="share", replicas=({"": 0}, {"": 1}))
    split = replace(SINGLE, strategy="split", replicas=({"": 0, ATTENTION: 1},))
    runs = [measured(small, layout, [GIB] * 2) for layout in (SINGLE, share, split)]
    assert static_scales(runs[0]) == static_scales(runs[1]) == static_scales(runs[2])


@pytest.mark.parametrize("placed", [{}, {f"{ATTENTION}.k_proj": 1, f"{MLP}.gate_proj": 1}], ids=["together", "apart"])
@pytest.mark.parametrize("search", [False, True], ids=["plain", "searched"])
@pytest.mark.parametrize("iters", [0, 2])
def test_global_scales_are_one_where_servers_fuse_layers(iters: int, search: bool, placed: Mapping[str, int]) -> None:
    small = Small(scheme="NVFP4", tune=replace(TUNE, iters=iters, search_scales=search))
    run = measured(small, replace(SINGLE, replicas=({"": 0, **placed},)), [GIB] * 2)
    groups = (
        [f"{ATTENTION}.{last}_proj" for last in "qkv"],
        [f"{MLP}.gate_proj", f"{MLP}.up_proj"],
        [f"{ATTENTION}.o_proj"],
        [f"{MLP}.down_proj"],
    )
    assert {name for names in groups for name in names} == run.quantized.keys()
    for names in groups:
        largest = [float(small.skeleton.read(f"{name}.weight").abs().max()) for name in names]
        assert len(set(largest)) == len(names)  # else nothing would have to be shared
        for name in names:
            whole, inputs = run.quantized[name].global_scale, run.quantized[name].input_scale
            assert whole is not None and float(whole) == nv_global(max(largest))
            assert inputs is not None and torch.equal(inputs, run.quantized[names[0]].input_scale)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Quantized inputs


class ByHand(nn.Module):
    """A layer whose input is quantized before."""

    def __init__(self, inner: nn.Module, scheme: Scheme, scale: Tensor | None) -> None:
        super().__init__()
        self.inner, self.scheme, self.scale = inner, scheme, scale

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(fake_quantize(values, self.scheme.activation, self.scale))


def by_hand(block: Block, scales: Mapping[str, Tensor | None], weights: Mapping[str, Tensor] | None = None) -> Block:
    """A copy of the block with its layers replaced; of the head: a block around it."""
    module = copy.deepcopy(block.module)
    for site, scheme in block.sites:
        path = site.name.removeprefix(block.name).removeprefix(".")
        inner = module.get_submodule(path)
        if weights is not None:
            inner.weight.data = weights[site.name].t() if site.transposed else weights[site.name]
        layer = ByHand(inner, scheme, scales[site.name])
        if not path:
            return Block(block.name, layer, block.call, ())
        parent, _, last = path.rpartition(".")
        setattr(module.get_submodule(parent), last, layer)
    return Block(block.name, module, block.call, ())


ACTIVATIONS = ["MXFP4", "MXFP8", "NVFP4", "FP8_STATIC", "FP8_DYNAMIC", "FP8_TILES", "INT8", "INT4", "MXINT4"]


def scales_of(group: Group, small: Small, hidden: Tensor) -> dict[str, Tensor | None]:
    seen = float_outputs(group, chain_of(hidden), None, small.tune)
    return {name: start.input_scale for name, start in start_values(group, small.tune, seen).items()}


@pytest.mark.parametrize(
    ("scheme", "architecture"), [*((scheme, "llama") for scheme in ACTIVATIONS), ("FP8_STATIC", "gpt2"), ("MXFP4", "gpt2"), ("INT8", "opt")]
)
def test_inputs_are_quantized_when_the_quantized_group_runs(scheme: str, architecture: str) -> None:
    small = Small(scheme=scheme, architecture=architecture, samples=4)
    hidden = hidden_of(small)
    with block_of(small) as block, group_of([block], 4) as group, torch.no_grad():
        scales = scales_of(group, small, hidden)
        intakes = quantized_inputs(group, scales)
        assert intakes.keys() == {site.name for site, _ in block.sites}
        found = group.forward(hidden, range(4), 0, group.float_weights()[0], intakes)
        plain = group.forward(hidden, range(4), 0, group.float_weights()[0])
        assert torch.equal(found, run_all([by_hand(block, scales)], hidden, 4))
        assert torch.equal(plain, run_all([replace(block, sites=())], hidden, 4))
        assert not torch.equal(found, plain) and hooks_of(block.module) == 0


@pytest.mark.parametrize("scheme", ["MXFP4", "FP8_STATIC", "NVFP4"])
def test_inputs_of_the_output_head_are_quantized(scheme: str) -> None:
    small = Small(scheme=scheme, head=True, samples=4)
    hidden = hidden_of(small)
    with block_of(small, -1) as block, group_of([block], 4) as group, torch.no_grad():
        scales = scales_of(group, small, hidden)
        found = group.forward(hidden, range(4), 0, group.float_weights()[0], quantized_inputs(group, scales))
        assert torch.equal(found, by_hand(block, scales).module(hidden)) and found.shape == (4, 12, 128)
        assert not torch.equal(found, block.module(hidden))


def test_sites_without_quantized_activations_have_no_intake() -> None:
    small = Small()
    with block_of(small) as block, group_of([block], 2) as group:
        assert quantized_inputs(group, {}) == {}


@pytest.mark.parametrize("scheme", ["FP8_STATIC", "NVFP4", "INT4"])
def test_the_reference_is_float_and_every_loss_is_of_quantized_inputs(scheme: str) -> None:
    """rtn_loss and tuned_loss against blocks whose layers were replaced by hand; targets against the untouched block."""
    small = Small(scheme=scheme, tune=replace(TUNE, iters=3, batch_size=7, search_scales=True))
    hidden, targets, outputs = hidden_of(small), host_chain(small.shape), host_chain(small.shape)
    with block_of(small) as block, group_of([block], 7) as group:
        seen = float_outputs(group, chain_of(hidden), targets, small.tune)
        plain = untuned(group, start_values(group, small.tune, seen), HOST)
        draw = Draw(7, 7, torch.Generator().manual_seed(1))
        result = tune_block(group, Samples(chain_of(hidden), targets, None), small.tune, draw, seen=seen, outputs=outputs)
        assert torch.equal(values_of(targets), run_all([replace(block, sites=())], hidden, 7))
        found = []
        for quantized in (plain, result.quantized):
            scales = {name: weight.input_scale for name, weight in quantized.items()}
            weights = {name: weight.dequantize() for name, weight in quantized.items()}
            found.append(run_all([by_hand(block, scales, weights)], hidden, 7))
    losses = [float((output - values_of(targets)).square().mean()) for output in found]
    assert result.rtn_loss == pytest.approx(losses[0], rel=1e-5) and result.losses[0] == pytest.approx(losses[0], rel=1e-5)
    if result.kept == "tuned":
        assert result.tuned_loss == pytest.approx(losses[1], rel=1e-5)
        assert torch.equal(values_of(outputs), found[1])
    else:
        assert torch.equal(values_of(outputs), found[0])


def test_the_head_is_held_against_float_logits_and_tuned_on_quantized_inputs() -> None:
    small = Small(scheme="FP8_STATIC", head=True, samples=3)
    hidden = hidden_of(small)
    with block_of(small, -1) as block, group_of([block], 3) as group, torch.no_grad():
        scales, weights = scales_of(group, small, hidden), group.float_weights()
        samples = Samples(chain_of(hidden), None, None, chain_of(hidden), weights)
        error = micro_batch_error(group, samples, range(3), 0, weights[0], 36, quantized_inputs(group, scales))
        wanted = (by_hand(block, scales).module(hidden) - hidden @ weights[0]["lm_head"].t()).square().mean()
    assert float(error) > 0 and float(error) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("scheme", ["MXFP4", "FP8_STATIC", "INT4", "NVFP4"])
def test_gradients_pass_straight_through(scheme: str) -> None:
    """Of one layer: to its input as if it had not been quantized, to its weight from the quantized input."""
    small = Small(scheme=scheme, head=True, samples=2)
    hidden, given = hidden_of(small).requires_grad_(), torch.randn(2, 12, 128, generator=torch.Generator().manual_seed(9))
    with block_of(small, -1) as block, group_of([block], 2) as group:
        scales = scales_of(group, small, hidden.detach())
        leaf = group.float_weights()[0]["lm_head"].clone().requires_grad_()
        group.forward(hidden, range(2), 0, {"lm_head": leaf}, quantized_inputs(group, scales)).backward(given)
        entered = fake_quantize(hidden.detach(), block.sites[0][1].activation, scales["lm_head"])
    torch.testing.assert_close(hidden.grad, given @ leaf.detach())
    torch.testing.assert_close(leaf.grad, given.reshape(-1, 128).t() @ entered.reshape(-1, 64))


def test_gradients_with_quantized_inputs_are_the_same_when_activations_are_computed_again() -> None:
    small = Small(scheme="NVFP4", samples=3)
    hidden, results = hidden_of(small), []
    with block_of(small) as block:
        for recompute in (False, True):
            layout = replace(SINGLE, micro_batch=3, recompute=recompute)
            with on_devices([block], Placement(layout, [HOST])) as group:
                intakes = quantized_inputs(group, scales_of(group, small, hidden))
                leaves = {name: weight.clone().requires_grad_() for name, weight in group.float_weights()[0].items()}
                group.forward(hidden, range(3), 0, leaves, intakes).square().sum().backward()
                results.append([leaf.grad for leaf in leaves.values()])
            assert hooks_of(block.module) == 0
    assert all(torch.equal(kept, again) for kept, again in zip(*results, strict=True))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # as torch.compile is first used
def test_blocks_that_are_compiled_run_uncompiled_on_quantized_inputs() -> None:
    """Compiled code would not see the hooks."""
    small = Small(scheme="FP8_DYNAMIC", samples=3)
    hidden, found = hidden_of(small), []
    with block_of(small) as block, torch.no_grad():
        for compiled in (None, {}):
            with on_devices([block], Placement(SINGLE, [HOST]), compiled) as group:
                found.append(group.forward(hidden, range(3), 0, group.float_weights()[0], quantized_inputs(group, {})))
        scales = {site.name: None for site, _ in block.sites}
        found.append(run_all([by_hand(block, scales)], hidden, 3))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_each_step_runs_on_quantized_inputs() -> None:
    """The gradient of a weight is not the one that float inputs give."""
    small = Small(scheme="FP8_STATIC", samples=3)
    hidden = hidden_of(small)
    gradients = []
    with block_of(small) as block:
        float_sites = tuple((site, Scheme(weight=scheme.weight)) for site, scheme in block.sites)
        for candidate in (block, replace(block, sites=float_sites)):
            with group_of([candidate], 3) as group:
                seen = float_outputs(group, chain_of(hidden), None, small.tune)
                states = initial_states(group, start_values(group, small.tune, seen), small.tune)
                targets = run_all([replace(block, sites=())], hidden, 3)
                loss, pending = step(group, states, Samples(chain_of(hidden), chain_of(targets), None), range(3))
                gradients.append((loss, pending[0].total(HOST)))
    assert gradients[0][0] > gradients[1][0] and not torch.equal(gradients[0][1], gradients[1][1])


def test_no_hook_is_left_when_an_exception_passes() -> None:
    small = Small(scheme="FP8_DYNAMIC", samples=2)

    def fail(values: Tensor) -> Tensor:
        raise ZeroDivisionError

    with block_of(small) as block, group_of([block], 2) as group:
        for name in (f"{ATTENTION}.q_proj", f"{MLP}.down_proj"):
            intakes = {**quantized_inputs(group, {}), name: fail}
            with pytest.raises(ZeroDivisionError), torch.no_grad():
                group.forward(hidden_of(small), range(2), 0, group.float_weights()[0], intakes)
            assert hooks_of(block.module) == 0


def test_all_schemes_here_are_the_ones_of_the_small_jobs() -> None:
    assert [*ACTIVATIONS, "W4A16_ASYM"] == list(SCHEMES)
