"""Simulated devices: the plain CPU's bits, exact bytes, and the errors of separate cards."""

import contextlib
import copy
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from conftest import ARCHITECTURES, chain_of, group_of, host_chain, plain_states, save_model, values_of
from evenround.blocks import Block, Group
from evenround.calls import BlockCall, embed
from evenround.checkpoint import Checkpoint
from evenround.config import TuneConfig
from evenround.memory.simulate import SimulatedDevices, SimulatedTensor
from evenround.model import Site, skeleton_from
from evenround.numerics.grouping import chunks
from evenround.scheme import Scheme, WeightScheme
from evenround.tune import Samples, follow_sign, step

GB = 10**9
W4 = Scheme(weight=WeightScheme(bits=4, group_size=32))


@pytest.fixture
def sim() -> Iterator[SimulatedDevices]:
    """Three devices of a gigabyte, entered."""
    with SimulatedDevices([GB, GB, GB]) as devices:
        yield devices


# ---------------------------------------------------------------------------------------------------------------------------------------
# The real step on them


@dataclass(frozen=True)
class Setup:
    module: nn.Module
    call: BlockCall
    name: str
    sites: tuple[tuple[Site, Scheme], ...]
    hidden: Tensor

    def fresh(self) -> "Setup":
        """With a module of its own. To be called outside of FakeTensorMode, whose copies of parameters cannot be moved."""
        return replace(self, module=copy.deepcopy(self.module))

    def samples(self) -> Samples:
        return Samples(chain_of(self.hidden), chain_of(self.hidden.roll(1, 0)), None)

    @contextlib.contextmanager
    def group(self, devices: Sequence[torch.device], places: Mapping[str, int] | None = None) -> Iterator[Group]:
        """The module on the first of `devices`, and what `places` (path in it → number) names on others; two samples at a time."""
        if devices[0].index is not None:
            self.module.to(devices[0])
        for path, number in (places or {}).items():
            self.module.get_submodule(path).to(devices[number])
        named = {f"{self.name}.{path}": number for path, number in (places or {}).items()}
        with group_of([Block(self.name, self.module, self.call, self.sites)], 2, devices, named) as group:
            yield group


def block_of(architecture: str, folder: Path, dtype: torch.dtype = torch.float32, tokens: int = 16) -> Setup:
    save_model(ARCHITECTURES[architecture], folder)
    skeleton = skeleton_from(folder, Checkpoint.open(folder))
    rows = torch.randint(3, 128, (4, tokens), generator=torch.Generator().manual_seed(5))
    embedded = embed(skeleton, rows, None, dtype, lambda shape: host_chain(shape, dtype))
    name = skeleton.block_names[1]
    with skeleton.materialized([name], dtype):
        module = copy.deepcopy(skeleton.block(1))
    sites = tuple((site, W4) for site in skeleton.sites if site.block == 1)
    return Setup(module, embedded.calls[1], name, sites, values_of(embedded.hidden))


SIMULATED = (torch.device("cpu", 0), torch.device("cpu", 1))
PLAIN = (torch.device("cpu"),)


def two_steps(setup: Setup, devices: Sequence[torch.device], placed: Mapping[str, int] | None = None) -> tuple[list[float], list[Tensor]]:
    """Losses and tuned parameters after two optimizer steps of two micro-batches each."""
    losses = []
    with setup.group(devices, placed) as group:
        states = plain_states(group, TuneConfig(momentum=0.8))
        for iteration in range(2):
            loss, pending = step(group, states, setup.samples(), range(4))
            follow_sign(group, pending, TuneConfig(iters=2, momentum=0.8), 1 - iteration / 2)
            losses.append(loss)
        return losses, [parameter.to("cpu") for state in states for parameter in state.parameters]


SPLIT = {"mlp.gate_proj": 1, "mlp.down_proj": 1, "self_attn.k_proj": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placed", [None, SPLIT], ids=["one", "two"])
def test_a_step_has_the_bits_of_the_plain_cpu(placed: dict[str, int] | None, dtype: torch.dtype, tmp_path: Path) -> None:
    setup = block_of("llama", tmp_path, dtype)
    losses, parameters = two_steps(setup.fresh(), PLAIN)
    with SimulatedDevices([GB, GB]) as sim:
        found_losses, found = two_steps(setup.fresh(), SIMULATED, placed)
    assert found_losses == losses and all(torch.equal(a, b) for a, b in zip(found, parameters, strict=True))
    assert (sim.peak[1] > 0) == bool(placed) and sim.peak[0] > 0
    assert sim.used == (0, 0)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_fake_tensors_have_the_bytes_of_real_ones(architecture: str, tmp_path: Path) -> None:
    setup = block_of(architecture, tmp_path)
    twin, placed = setup.fresh(), {"mlp": 1}
    real, fake = SimulatedDevices([GB, GB]), SimulatedDevices([GB, GB])
    with real:
        two_steps(setup, SIMULATED, placed)
    assert min(real.used) > 0  # the module
    del setup
    with FakeTensorMode(allow_non_fake_inputs=True), fake:
        two_steps(twin, SIMULATED, placed)
    del twin
    assert min(real.peak) > 0 and fake.peak == real.peak and fake.used == real.used == (0, 0)
    assert [fake.breakdown_at_peak(index) for index in range(2)] == [real.breakdown_at_peak(index) for index in range(2)]


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_step_fits_into_its_peak_and_not_into_a_byte_less(fake: bool, tmp_path: Path) -> None:
    setup = block_of("llama", tmp_path)
    measured = SimulatedDevices([GB, GB])
    with measured:
        two_steps(setup.fresh(), SIMULATED, SPLIT)
    for short in (None, 0, 1):
        twin = setup.fresh()
        sim = SimulatedDevices([peak - (index == short) for index, peak in enumerate(measured.peak)])
        raises = contextlib.nullcontext() if short is None else pytest.raises(torch.OutOfMemoryError, match=f"sim:{short} is full")
        with raises, FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext(), sim:
            two_steps(twin, SIMULATED, SPLIT)
        assert short is not None or sim.peak == measured.peak


def test_the_peak_of_a_step_is_that_of_the_cpus_own_allocator(tmp_path: Path) -> None:
    """An independent count: every allocation of a plain run, as the profiler sees it. Kernels' scratch space is all that differs."""
    setup = block_of("gpt2", tmp_path, tokens=64)

    def prepared(group: Group) -> Callable[[], object]:
        states = plain_states(group)
        samples = setup.samples()
        return lambda: step(group, states, samples, range(4))

    with setup.group(PLAIN) as group:
        plain = prepared(group)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            plain()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held, highest = 0, 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        highest = max(highest, held)
    with SimulatedDevices([GB]) as sim, setup.group(SIMULATED[:1]) as group:
        run = prepared(group)
        sim.reset_peak()
        before = sim.used[0]
        run()
    found = sim.peak[0] - before
    assert found > 1_000_000 and abs(found - highest) < 0.001 * highest


# ---------------------------------------------------------------------------------------------------------------------------------------
# Bytes by hand


def test_each_storage_counts_once_while_it_lives(sim: SimulatedDevices) -> None:
    x = torch.zeros(4, 6, device="cpu:0")
    assert sim.used == (96, 0, 0)
    views = [x[1:], x.t(), x.view(24), x.expand(3, 4, 6), *x.split(2), *x.unbind(1), x.detach(), x.data, x[None]]
    assert sim.used == (96, 0, 0)
    assert {view.untyped_storage()._cdata for view in views} == {x.untyped_storage()._cdata}
    x.add_(1).mul_(2)[0].zero_()
    views[2][5] = 7.0
    assert x[0, 5].item() == 7.0 and sim.used == (96, 0, 0)
    copied = x.clone()
    halves = x.to(torch.bfloat16)
    assert sim.used == (96 + 96 + 48, 0, 0)
    del x
    assert sim.used[0] == 240  # a view holds the whole storage
    del views
    assert sim.used[0] == 144
    del copied, halves
    assert sim.used == (0, 0, 0) and sim.peak == (240, 0, 0)


def test_what_backward_needs_is_held_until_then(sim: SimulatedDevices) -> None:
    x = torch.ones(10, 10, device="cpu:1", requires_grad=True)
    y = x.exp()  # saves its result
    z = y.sin()  # saves y
    del y
    assert sim.used[1] == 3 * 400
    total = z.sum()
    del z
    assert sim.used[1] == 2 * 400 + 4
    total.backward()
    assert sim.used[1] == 2 * 400 + 4  # x, its gradient, the sum
    assert x.grad is not None and torch.equal(x.grad.cpu(), torch.full((10, 10), torch.e).cos() * torch.full((10, 10), 1.0).exp())
    # y, x.cos's result and the gradient that enters, as one number; then the product: x, y, sum, cos, one, product
    assert sim.peak[1] == 400 + 400 + 4 + 400 + 4 + 400
    del total, x
    assert sim.used[1] == 0


def test_copies_between_devices_and_the_host(sim: SimulatedDevices) -> None:
    x = torch.arange(8.0, device="cpu:0")
    there, home = x.to("cpu:2"), x.to("cpu")
    assert type(home) is Tensor and home.device == torch.device("cpu") and sim.used == (32, 0, 32)
    assert x.to("cpu:0") is x and x.cpu().device.index is None and there.device == torch.device("cpu", 2)
    home.copy_(there + 1)
    there.copy_(home)
    home[2:4] = x[:2]
    assert home.tolist() == [1, 2, 0, 1, 5, 6, 7, 8] and there.tolist() == [1, 2, 3, 4, 5, 6, 7, 8] and sim.used == (32, 0, 32)


def test_creation_on_a_device(sim: SimulatedDevices) -> None:
    x = torch.empty(2, 3, dtype=torch.float16, device="cpu:1")
    made = [torch.zeros_like(x), torch.full_like(x, 2), x.new_zeros(5), x.new_tensor([1.0]), torch.arange(3, device="cpu:1")]
    assert [tensor.device for tensor in made] == [torch.device("cpu", 1)] * 5
    assert sim.used == (0, 12 + 12 + 12 + 10 + 2 + 24, 0)
    for numbers in (
        torch.tensor([1, 2], device="cpu:2"),
        torch.as_tensor([1, 2], device="cpu:2"),
        torch.as_tensor(torch.tensor([1, 2]), device="cpu:2"),
    ):
        assert numbers.device.index == 2 and numbers.tolist() == [1, 2] and sim.used[2] == 48
    del numbers
    assert torch.tensor(1.0, device="cpu:0", requires_grad=True).requires_grad
    with torch.device("cpu:2"):
        layer = nn.Linear(3, 4)
        assert torch.tensor(1.5).device == torch.device("cpu", 2)
    assert sim.used[2] == 64 and isinstance(layer.weight, nn.Parameter)
    assert torch.zeros_like(x, device="cpu:0").device.index == 0
    assert all(type(tensor) is Tensor for tensor in (torch.zeros(3), torch.ones_like(x, device="cpu"), x.new_zeros(3, device="cpu")))
    assert torch.empty_like(x, device="meta").device.type == "meta"


def test_results_in_given_tensors_and_tensors_that_change_shape(sim: SimulatedDevices) -> None:
    x, out = torch.ones(2, 3, device="cpu:0"), torch.empty(0, device="cpu:0")
    assert torch.mul(x, x, out=out) is out and out.shape == (2, 3) and sim.used[0] == 48
    torch.add(x, x, out=out)
    assert sim.used[0] == 48 and out.tolist() == [[2, 2, 2], [2, 2, 2]]
    out.t_().unsqueeze_(0)
    assert out.shape == (1, 3, 2) and out.stride() == torch.empty(2, 3).t_().unsqueeze_(0).stride() and sim.used[0] == 48
    out.resize_(10)
    assert out.shape == (10,) and sim.used[0] == 24 + 40
    out.set_(x)
    assert sim.used[0] == 24 and out.shape == (2, 3)
    values, indices = torch.empty(2, device="cpu:0"), torch.empty(2, dtype=torch.long, device="cpu:0")
    torch.max(x, 1, out=(values, indices))
    assert values.tolist() == [1, 1] and sim.used[0] == 24 + 8 + 16


def test_modules_move_as_a_whole_and_stay_tied(sim: SimulatedDevices) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    both = nn.ModuleList([first, second, nn.BatchNorm1d(4)])
    weight = first.weight
    expected = [copy.deepcopy(value) for value in both.state_dict().values()]
    size = (16 + 4 + 4 * 4) * 4 + 8
    both.to("cpu:1")
    assert first.weight is weight is second.weight and isinstance(weight, SimulatedTensor) and sim.used == (0, size, 0)
    first(torch.ones(2, 4, device="cpu:1")).sum().backward()
    assert weight.grad is not None and weight.grad.device.index == 1 and sim.used == (0, size + 80, 0)
    both.to("cpu:2")
    assert weight.grad.device.index == 2 and sim.used == (0, 0, size + 80)
    both.to("cpu:2").to(torch.bfloat16)
    assert sim.used == (0, 0, (size - 8 + 80) // 2 + 8)
    both.float().to("cpu")
    assert first.weight is weight is second.weight and type(weight) is nn.Parameter and sim.used == (0, 0, 0)
    assert all(a.shape == b.shape for a, b in zip(expected, both.state_dict().values(), strict=True))


def test_the_data_of_a_parameter_can_be_swapped(sim: SimulatedDevices) -> None:
    parameter = same = nn.Parameter(torch.ones(3))
    parameter.data = parameter.data.to("cpu:0")
    assert parameter is same and parameter.device.index == 0 and parameter.requires_grad and isinstance(parameter, nn.Parameter)
    assert sim.used == (12, 0, 0)
    parameter.data = torch.zeros(5, dtype=torch.bfloat16, device="cpu:1")
    assert parameter.shape == (5,) and parameter.dtype == torch.bfloat16 and sim.used == (0, 10, 0)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None and parameter.grad.device.index == 1
    parameter.data = parameter.data.to("cpu")
    assert type(parameter) is nn.Parameter and type(parameter.grad) is Tensor and sim.used == (0, 0, 0)


def test_weights_can_be_passed_to_a_module(sim: SimulatedDevices) -> None:
    layer = nn.Linear(3, 3, bias=False).to("cpu:0")
    weight = torch.eye(3, device="cpu:0").mul(2).requires_grad_()
    output = functional_call(layer, {"weight": weight}, torch.ones(1, 3, device="cpu:0"))
    output.sum().backward()
    assert output.tolist() == [[2, 2, 2]] and layer.weight.grad is None and weight.grad is not None and sim.used[0] == 36 * 3 + 12


@pytest.mark.parametrize("mask", [False, True])
def test_attention_forward_and_backward(sim: SimulatedDevices, mask: bool) -> None:
    q, k, v = (torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    bias = torch.randn(2, 1, 16, 16) if mask else None

    def run(device: str) -> list[Tensor]:
        leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in (q, k, v)]
        output = scaled_dot_product_attention(*leaves, attn_mask=None if bias is None else bias.to(device), is_causal=not mask)
        if device != "cpu":  # q, k, v, the output, the logarithms of the sums, and the mask
            assert sim.used[0] == 4 * q.nbytes + 2 * 4 * 16 * 4 + (0 if bias is None else bias.nbytes)
        output.square().sum().backward()
        return [output.detach().to("cpu")] + [leaf.grad.to("cpu") for leaf in leaves if leaf.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(run("cpu:0"), run("cpu"), strict=True)) and sim.used[0] == 0


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_keep_their_state_on_the_device(sim: SimulatedDevices, foreach: bool) -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(3)
        parameters = [nn.Parameter(torch.randn(10).to(device)), nn.Parameter(torch.randn(4).to("cpu" if device == "cpu" else "cpu:1"))]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=foreach)
        for _ in range(3):
            sum((parameter**2).sum().to(device) for parameter in parameters).backward()  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if device != "cpu":
            assert sim.used == (3 * 40, 3 * 16, 0)
        return [parameter.detach().to("cpu") for parameter in parameters]

    assert all(torch.equal(a, b) for a, b in zip(run("cpu:0"), run("cpu"), strict=True)) and sim.used == (0, 0, 0)


def test_random_numbers_are_the_hosts(sim: SimulatedDevices) -> None:
    def draw(device: str) -> list[list[float]]:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(2)
        x = torch.rand(5, device=device)
        drawn = [x, torch.randn(5, device=device, generator=generator), torch.dropout(x, 0.5, True), torch.empty_like(x).uniform_()]
        return [tensor.tolist() for tensor in [*drawn, torch.randperm(5, device=device, generator=generator)]]

    assert draw("cpu:1") == draw("cpu")


def test_inference_mode_copies_and_recomputation(sim: SimulatedDevices) -> None:
    layer = nn.Linear(4, 4).to("cpu:0")
    with torch.inference_mode():
        assert layer(torch.ones(2, 3, 4, device="cpu:0")).device.index == 0
    twin = copy.deepcopy(layer)
    assert sim.used[0] == 160 and twin.weight.tolist() == layer.weight.tolist()
    x = torch.ones(2, 4, device="cpu:0", requires_grad=True)
    checkpoint(lambda value: layer(value).exp(), x, use_reentrant=False).sum().backward()
    assert x.grad is not None and "cpu:0" in repr(x)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Categories, capacities, errors


def test_the_breakdown_is_that_of_the_first_moment_of_the_peak(sim: SimulatedDevices) -> None:
    with sim.label("weights"):
        w = torch.ones(10, 10, device="cpu:0", requires_grad=True)
    with sim.label("chained inputs"):
        inputs = torch.ones(5, 10).to("cpu:0")
    with sim.label("saved activations"):
        part = inputs[:2].to("cpu:1")
        back = part.to("cpu:0")
        loss = (back @ w).exp().sum()
        loss.backward()
    # at the peak: the loss and the one that backward starts from; the gradients of the product and of w
    assert sum(sim.breakdown_at_peak(0).values()) == sim.peak[0]
    assert sim.breakdown_at_peak(0) == {
        "weights": 400, "chained inputs": 200, "transfers": 80, "saved activations": 4 + 4, "gradients": 80 + 400,
    }  # fmt: skip
    assert sim.breakdown_at_peak(1) == {"transfers": 80}
    sim.reset_peak()
    assert sim.peak == sim.used == (400 + 200 + 80 + 4 + 400, 80, 0)
    del loss, back, w, inputs, part


def test_the_innermost_label_counts_and_unknown_ones_are_refused(sim: SimulatedDevices) -> None:
    with sim.label("weights"), sim.label("tuning state"):
        state = torch.ones(1, device="cpu:0")
        with sim.label("transfers"):
            more = torch.ones(2, device="cpu:0")
    other = torch.ones(3, device="cpu:0")
    assert sim.breakdown_at_peak(0) == {"tuning state": 4, "transfers": 8, "other": 12}
    with pytest.raises(ValueError, match="no category 'misc'; there are weights, tuning state"), sim.label("misc"):  # type: ignore[arg-type]
        pass
    del state, more, other


def test_a_capacity_is_hard_and_can_shrink() -> None:
    sim = SimulatedDevices([100, 40])
    with sim:
        x = torch.zeros(20, device="cpu:0")
        message = r"sim:0 is full: 24 bytes for other do not fit; of 100 bytes 20 are free and 80 in use \(other 80\)"
        with pytest.raises(torch.OutOfMemoryError, match=message):
            torch.zeros(6, device="cpu:0")
        assert sim.used == (80, 0) and sim.peak == (80, 0)
        y = torch.zeros(5, device="cpu:0")
        with pytest.raises(torch.OutOfMemoryError, match="sim:1 is full: 80 bytes for transfers .* 0 in use .nothing"):
            x.to("cpu:1")
        sim.set_capacity(0, 50)
        assert sim.capacities == (50, 40) and sim.used == (100, 0)
        x.add_(1)
        x[:3].mul_(2)
        with pytest.raises(torch.OutOfMemoryError, match="of 50 bytes 0 are free and 100 in use"):
            x[:1].clone()
        del x
        z = torch.zeros(7, device="cpu:0")
        assert sim.used == (48, 0)
        del y, z


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b, host: a + b,
        lambda a, b, host: a @ b,
        lambda a, b, host: torch.cat([a, b]),
        lambda a, b, host: a.add_(b),
        lambda a, b, host: torch.add(a, a, out=b),
        lambda a, b, host: a + b.sum(),  # without dimensions, but on another card
        lambda a, b, host: a + host,
        lambda a, b, host: host.sum().add_(a.sum()),
        lambda a, b, host: host.add_(a.sum()),
        lambda a, b, host: host[a.long()],
        lambda a, b, host: a[b.long()],
        lambda a, b, host: torch.where(host > 0, a, a),
        lambda a, b, host: nn.functional.embedding(host.long(), a),
    ],
)
def test_tensors_of_different_devices_do_not_mix(sim: SimulatedDevices, mix: Callable[..., object]) -> None:
    a, b, host = torch.ones(2, 2, device="cpu:0"), torch.ones(2, 2, device="cpu:1"), torch.ones(2, 2)
    with pytest.raises(
        RuntimeError, match=r"Expected all tensors to be on the same device, but found at least two devices, cpu(:0)? and cpu:"
    ):
        mix(a, b, host)


def test_what_may_mix(sim: SimulatedDevices) -> None:
    a, number, numbers = torch.arange(4.0, device="cpu:0"), torch.tensor(2.0), torch.tensor([3, 0])
    assert (a * number).tolist() == [0, 2, 4, 6] and (number - a).device.index == 0
    assert a[numbers].tolist() == [3, 0] and a[torch.tensor([True, False, False, True])].tolist() == [0, 3]
    a[numbers] = torch.tensor(9.0)
    a.index_put_((torch.tensor([1]),), torch.ones(1, device="cpu:0"), accumulate=True)
    assert a.tolist() == [9, 2, 2, 9]
    x = a.clone().requires_grad_()
    x[numbers].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 0, 0, 1]


def test_wrong_places_are_named(sim: SimulatedDevices) -> None:
    x = torch.ones(2, device="cpu:0")
    with pytest.raises(RuntimeError, match="invalid device ordinal: no cpu:3 among 3 simulated devices"):
        x.to("cpu:3")
    with pytest.raises(NotImplementedError, match="a storage cannot be given"):
        x.set_(x.untyped_storage(), 0, (2,), (1,))
    with pytest.raises(RuntimeError, match="belongs to other SimulatedDevices"), SimulatedDevices([GB]):
        x + 1


def test_outside_of_the_context_tensors_only_wait_and_are_freed() -> None:
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    sim = SimulatedDevices([GB])
    with sim:
        x = torch.ones(4, device="cpu:0")
        y = x[1:]
    with pytest.raises(RuntimeError, match="outside of `with SimulatedDevices"):
        x + 1
    assert torch.__future__.get_swap_module_params_on_conversion() == swaps and sim.used == (16,)
    with sim, sim:
        assert (x + 1).tolist() == [2, 2, 2, 2]
    with pytest.raises(ZeroDivisionError), sim:
        raise ZeroDivisionError
    assert torch.ones(2, device="cpu:0").device.index is None
    del x
    assert sim.used == (16,)
    del y
    assert sim.used == (0,)


def test_nothing_is_kept_by_cycles() -> None:
    gc.disable()
    try:
        sim = SimulatedDevices([GB])
        with sim:
            layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)).to("cpu:0")
            layers(torch.ones(2, 8, device="cpu:0")).square().mean().backward()
            gradients = sum(parameter.nbytes for parameter in layers.parameters())
            assert sim.used[0] == 2 * gradients
            layers.zero_grad()
            assert sim.used[0] == gradients
        del layers
        assert sim.used == (0,)
    finally:
        gc.enable()


def test_values_of_fake_tensors_are_made_up() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), SimulatedDevices([10**15]) as sim:
        x = torch.zeros(10**6, 10**6, device="cpu:0")
        assert sim.used == (4 * 10**12,) and float(x.sum()) == 1.0 and int(x.long()[0, 0]) == 1 and bool(torch.isfinite(x).all())
        assert torch.equal(x, x) and int(torch.tensor(3)) == 3 and float(torch.zeros(2).sum()) == 1.0


# ---------------------------------------------------------------------------------------------------------------------------------------
# Properties


def live(pool: list[Tensor], devices: int) -> tuple[int, ...]:
    """Bytes of the distinct storages of the tensors on each device."""
    storages: dict[int, tuple[int, int]] = {}
    for tensor in pool:
        if isinstance(tensor, SimulatedTensor):
            storage = tensor._inner.untyped_storage()
            storages[storage._cdata] = (tensor.device.index, storage.nbytes())
    return tuple(sum(size for device, size in storages.values() if device == index) for index in range(devices))


OPERATIONS: tuple[Callable[[Tensor, Tensor, int], object], ...] = (
    lambda a, b, n: torch.ones(n + 1, 3, device=f"cpu:{n % 2}"),
    lambda a, b, n: a.to(f"cpu:{n % 2}"),
    lambda a, b, n: a.to("cpu"),
    lambda a, b, n: a.clone(),
    lambda a, b, n: a + a,
    lambda a, b, n: a.add_(1),
    lambda a, b, n: a.t(),
    lambda a, b, n: a[n % len(a) :],
    lambda a, b, n: a.expand(n % 3 + 1, *a.shape)[0],
    lambda a, b, n: a.reshape(-1, a.shape[0]),
    lambda a, b, n: a.split(1)[0],
    lambda a, b, n: torch.mul(a, 2, out=torch.empty(0, device=a.device)),
    lambda a, b, n: a.copy_(b) if a.shape == b.shape else None,
    lambda a, b, n: torch.cat([a, b.to(a.device)]) if a.shape[1] == b.shape[1] else None,
    lambda a, b, n: a.topk(1, dim=0)[1],
    lambda a, b, n: a.double(),
    lambda a, b, n: b.new_zeros(n + 1, 2),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(OPERATIONS)), st.integers(0, 99), st.integers(0, 99)), max_size=25), st.booleans())
def test_used_is_the_sum_of_live_storages(moves: list[tuple[int, int, int]], fake: bool) -> None:
    sim = SimulatedDevices([GB, GB])
    with FakeTensorMode() if fake else contextlib.nullcontext(), sim:
        pool: list[Tensor] = [torch.zeros(2, 3, device="cpu:0")]
        for which, first, second in moves:
            a, b = pool[first % len(pool)], pool[second % len(pool)]
            if which == len(OPERATIONS):
                pool.pop(first % len(pool)) if len(pool) > 1 else None
            else:
                made = OPERATIONS[which](a, b, second % 7)
                pool += [made] if isinstance(made, Tensor) and made.numel() else []
                del made
            del a, b
            assert sim.used == live(pool, 2)
            assert all(sim.peak[index] >= sim.used[index] for index in range(2))
            assert all(sum(sim.breakdown_at_peak(index).values()) == sim.peak[index] for index in range(2))
        pool.clear()
    assert sim.used == (0, 0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["linear", "norm", "gelu", "softmax", "skip"]), min_size=1, max_size=8), st.integers(0, 2**16))
def test_random_networks_over_two_devices_have_the_bits_of_the_plain_cpu(kinds: list[str], seed: int) -> None:
    def run(devices: tuple[str, str]) -> list[Tensor]:
        torch.manual_seed(seed)
        weights = [torch.randn(6, 6).to(devices[number % 2]).requires_grad_() for number in range(len(kinds))]
        first = x = torch.randn(3, 6).to(devices[0]).requires_grad_()
        for number, (kind, weight) in enumerate(zip(kinds, weights, strict=True)):
            x = x.to(devices[number % 2])
            if kind == "skip":
                x = x + (x @ weight).tanh()
            elif kind == "linear":
                x = x @ weight
            else:
                functions = {
                    "norm": lambda v: nn.functional.layer_norm(v, (6,)),
                    "gelu": nn.functional.gelu,
                    "softmax": lambda v: v.softmax(-1),
                }
                x = functions[kind](x)
        x.square().sum().backward()
        return [leaf.grad.to("cpu") for leaf in [first, *weights] if leaf.grad is not None]

    with SimulatedDevices([GB, GB]) as sim:
        found = run(("cpu:0", "cpu:1"))
    assert all(torch.equal(a, b) for a, b in zip(found, run(("cpu", "cpu")), strict=True)) and sim.used == (0, 0)


def test_a_simulated_device_works_on_whole_weights_at_once_as_an_accelerator_does() -> None:
    rows = torch.zeros(4096, 64)
    assert len(chunks(rows)) == 4
    with SimulatedDevices([2**24]):
        assert len(chunks(rows.to("cpu:0"))) == 1
