"""Placement: modules run where the layout says, callers notice nothing, and it is all gone afterwards."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import accelerate
import pytest
import torch
from torch import Tensor, nn

from evenround.blocks import Block, on_devices
from evenround.calls import BlockCall
from evenround.memory.place import ON_HOST, Layout, Placement, moved
from evenround.memory.simulate import SimulatedDevices
from small_jobs import GIB, Small

HOST = torch.device("cpu")


def layout(*replicas: Mapping[str, int], **changes: object) -> Layout:
    return replace(Layout(strategy="map", replicas=replicas, owners={}, micro_batch=2, chains="host"), **changes)  # type: ignore[arg-type]


@contextlib.contextmanager
def placed(of: Layout, count: int) -> Iterator[Placement]:
    with SimulatedDevices([GIB] * count) as devices:
        yield Placement(of, [torch.device("cpu", at) for at in range(count)], devices.label)


def test_the_nearest_named_ancestor_decides_where_a_module_runs() -> None:
    of = layout({"": 0, "a": 1, "a.b.c": 2, "ab": 3}, {"": 4, "a.b": 5})
    assert [of.device_of(name) for name in ("", "x", "a", "a.b", "a.b.c", "a.b.c.d", "a.b.x", "ab", "ab.c", "abc")] == [
        0, 0, 1, 1, 2, 2, 1, 3, 3, 0,
    ]  # fmt: skip
    assert [of.device_of(name, 1) for name in ("a", "a.b", "a.b.c")] == [4, 5, 5]


def test_sites_are_kept_where_the_layout_says_or_where_they_run() -> None:
    of = layout({"": 0, "a": 1}, owners={"a.q": 0, "a.k": ON_HOST})
    assert [of.owner_of(name) for name in ("a.q", "a.k", "a.v", "b")] == [0, ON_HOST, 1, 0]
    place = Placement(of, [torch.device("cpu", 0), torch.device("cpu", 1)])
    assert place.owner("a.k") == HOST and place.work("a.k") == torch.device("cpu", 1) == place.device("a.k")
    assert place.owner("a.q") == torch.device("cpu", 0) == place.work("a.q")
    # Weights of sites are loaded to their owner; what else a module holds, to where it runs.
    names = ("a.q.weight", "a.q.bias", "a.k.weight", "a.v.weight", "norm.weight")
    assert [str(place.home(name)) for name in names] == ["cpu:0", "cpu:1", "cpu", "cpu:1", "cpu:0"]


def test_what_is_at_once_alive() -> None:
    assert layout({"": 0}, {"": 1}, micro_batch=3, in_flight=4).at_once == 24


class Glue(nn.Module):
    """Two children and sums of its own; one child takes keyword arguments and gives a mapping, another has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), Named(), nn.Identity()

    def forward(self, hidden: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        found = self.second(values=[self.first(hidden)], scale=scale, text="not a tensor")
        assert found["text"] == "not a tensor"
        return self.third(hidden) + found["values"][0], scale * 2


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, *, values: list[Tensor], scale: Tensor, text: str) -> dict[str, object]:
        return {"values": [self.inner(values[0]) * scale], "text": text}


@contextlib.contextmanager
def watched(root: nn.Module) -> Iterator[dict[str, tuple[str, str]]]:
    """Module → devices of what its own code was given and gave. Hooks of a spy, inside of those of the placement."""
    seen: dict[str, tuple[str, str]] = {}
    for path, module in root.named_modules():

        def spied(*args: object, path: str = path, forward: object = module.forward, **kwargs: object) -> object:
            result = forward(*args, **kwargs)  # type: ignore[operator]
            seen[path] = (places((args, kwargs)), places(result))
            return result

        module.forward = spied
    try:
        yield seen
    finally:
        for module in root.modules():
            del module.forward


def places(values: object) -> str:
    leaves = torch.utils._pytree.tree_leaves(values)
    return ",".join(sorted({str(leaf.device) for leaf in leaves if isinstance(leaf, Tensor)}))


def hooks_of(root: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in root.modules())


@pytest.fixture
def glue() -> Glue:
    torch.manual_seed(0)
    return Glue().requires_grad_(False)


def on(model: nn.Module, place: Placement, name: str) -> None:
    """The parameters go where the layout has them."""
    for path, module in model.named_modules(prefix=name):
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[leaf] = nn.Parameter(parameter.to(place.device(path)), requires_grad=False)


def test_every_module_runs_where_it_is_placed_and_results_come_back_to_the_caller(glue: Glue) -> None:
    hidden, scale = torch.randn(2, 4), torch.tensor([3.0])
    expected = glue(hidden, scale=scale)
    with placed(layout({"": 0, "m.first": 1, "m.second": 2, "m.second.inner": 1, "m.third": 3}), 4) as place:
        on(glue, place, "m")
        with watched(glue) as seen, place.moving({"m": glue}):
            assert hooks_of(glue) == 2 * 4
            result = glue(hidden.to("cpu:0"), scale=scale.to("cpu:0"))
        assert seen == {
            "first": ("cpu:1", "cpu:1"),
            "second": ("cpu:2", "cpu:2"),
            "second.inner": ("cpu:1", "cpu:1"),
            "third": ("cpu:3", "cpu:3"),
            "": ("cpu:0", "cpu:0"),
        }
        assert all(str(value.device) == "cpu:0" for value in result)
        assert all(torch.equal(value.cpu(), wanted) for value, wanted in zip(result, expected, strict=True))


def test_only_where_the_device_changes_there_are_hooks_and_after_an_exception_there_are_none(glue: Glue) -> None:
    with placed(layout({"": 0, "m.second.inner": 1}), 2) as place:
        assert place.cuts("m", glue)
        with pytest.raises(ZeroDivisionError), place.moving({"m": glue}):
            assert hooks_of(glue) == 2 == hooks_of(glue.second.inner)
            raise ZeroDivisionError
        assert hooks_of(glue) == 0
    same = Placement(layout({"": 0, "m.first": 0}), [HOST])
    assert not same.cuts("m", glue)
    with same.moving({"m": glue}):
        assert hooks_of(glue) == 0


def test_hooks_that_were_there_stay(glue: Glue) -> None:
    calls = []
    handle = glue.first.register_forward_hook(lambda *args: calls.append(1))
    with placed(layout({"": 0, "m.first": 1}), 2) as place:
        with place.moving({"m": glue}):
            assert hooks_of(glue) == 3
        assert hooks_of(glue) == 1
    glue(torch.randn(1, 4), scale=torch.ones(1))
    assert calls == [1]
    handle.remove()


def test_a_replica_runs_on_its_own_devices(glue: Glue) -> None:
    of = layout({"": 0, "m.first": 1}, {"": 2, "m.third": 3})
    with placed(of, 4) as place:
        with watched(glue) as seen, place.moving({"m": glue}):
            for replica, (own, first, third) in enumerate([("cpu:0", "cpu:1", "cpu:0"), ("cpu:2", "cpu:2", "cpu:3")]):
                tensors = {
                    name: tensor.to(place.device(f"m.{name}".rpartition(".")[0], replica)) for name, tensor in glue.state_dict().items()
                }
                inputs = (torch.randn(2, 4).to(own),), {"scale": torch.ones(1).to(own)}
                with place.running(replica):
                    torch.func.functional_call(glue, tensors, *inputs)
                assert seen["first"][0] == first and seen["third"][0] == third and seen[""] == (own, own)
        with pytest.raises(ZeroDivisionError), place.running(1):
            raise ZeroDivisionError
        assert place._replica == 0


def test_moved_keeps_what_is_no_tensor_and_what_is_there() -> None:
    tensor = torch.ones(2)
    values = moved({"a": (tensor, "text", 3), "b": [None]}, HOST)
    assert values["a"][0] is tensor and values["a"][1:] == ("text", 3) and values["b"] == [None]


# Whole blocks.


@contextlib.contextmanager
def block_on(small: Small, of: Layout, count: int) -> Iterator[tuple[Block, Placement]]:
    """Block 0, materialized on `count` simulated devices."""
    job = small.jobs()[0]
    with placed(of, count) as place, job.skeleton.materialized(job.names, job.dtype, place.home):
        yield job.blocks()[0], place


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "bloom"])
def test_gradients_are_the_same_when_activations_are_computed_again(architecture: str) -> None:
    small = Small(architecture=architecture, samples=3)
    hidden = torch.randn(small.shape, generator=torch.Generator().manual_seed(2))
    results = []
    for recompute in (False, True):
        of = layout({"": 0, "model.layers.0.mlp": 1, "transformer.h.0.mlp": 1}, recompute=recompute)
        with block_on(small, of, 2) as (block, place), on_devices([block], place) as group:
            (leaves,) = group.float_weights()
            for leaf in leaves.values():
                leaf.requires_grad_()
            output = group.forward(hidden.to("cpu:0"), [0, 1, 2], 0, leaves)
            output.square().sum().backward()
            results.append([output.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves.values())])
    assert len(results[0]) > 3
    assert all(torch.equal(kept, again) for kept, again in zip(*results, strict=True))


def test_without_gradients_nothing_is_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("checkpointed")

    monkeypatch.setattr("evenround.blocks.checkpoint", refuse)
    small = Small(samples=2)
    with block_on(small, layout({"": 0}, recompute=True), 1) as (block, place), on_devices([block], place) as group:
        with torch.no_grad():
            assert group.forward(torch.randn(small.shape).to("cpu:0"), [0, 1], 0, group.float_weights()[0]).shape == small.shape
        with pytest.raises(AssertionError, match="checkpointed"):
            group.forward(torch.randn(small.shape).to("cpu:0"), [0, 1], 0, group.float_weights()[0])


def test_a_group_leaves_no_hooks_and_no_memory_when_its_work_fails() -> None:
    small = Small(samples=2)
    job = small.jobs()[0]
    with SimulatedDevices([GIB, GIB]) as devices:
        place = Placement(layout({"": 0, "model.layers.0.mlp": 1}, {"": 1}), [torch.device("cpu", 0), torch.device("cpu", 1)])
        with pytest.raises(ZeroDivisionError), job.skeleton.materialized(job.names, job.dtype, place.home):
            (block,) = job.blocks()
            with on_devices([block], place) as group:
                assert hooks_of(block.module) == 2 and len(group.replicas) == 2 and devices.used[1] > 0
                raise ZeroDivisionError
        assert hooks_of(job.skeleton.block(0)) == 0
        del group, block
        assert devices.used == (0, 0)


def test_a_block_without_parameters_can_be_placed() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, hidden: Tensor) -> Tensor:
            return self.act(hidden)

    block = Block("b", Bare(), BlockCall((), {}, None, False), ())
    with placed(layout({"": 0, "b.act": 1}), 2) as place, on_devices([block], place) as group:
        output = group.forward(torch.tensor([[[-1.0, 2.0]]]).to("cpu:0"), [0], 0, group.float_weights()[0])
        assert output.tolist() == [[[0.0, 2.0]]] and str(output.device) == "cpu:0"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # as torch.compile is first used
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks at it where code breaks
@pytest.mark.parametrize("cut", [False, True])
def test_compiled_blocks_give_what_they_give(cut: bool) -> None:
    """Two unequal names of the CPU are two devices to a placement: hooks are there, and no simulation, which sees no compiled code."""
    small = Small(samples=2)
    job = small.jobs()[0]
    of = layout({"": 0, **({"model.layers.0.mlp": 1, "model.layers.0.self_attn.q_proj": 1} if cut else {})})
    place = Placement(of, [torch.device("cpu"), torch.device("cpu", 0)])
    hidden = torch.randn(small.shape, generator=torch.Generator().manual_seed(4))
    found = []
    for compiled in (None, {}):
        with job.skeleton.materialized(job.names, job.dtype), on_devices(job.blocks(), place, compiled) as group:
            assert hooks_of(job.skeleton.block(0)) == (4 if cut else 0)
            (leaves,) = group.float_weights()
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
            output = group.forward(hidden, [0, 1], 0, leaves)
            output.square().sum().backward()
            found.append([output.detach(), *(leaf.grad for leaf in leaves.values())])
        assert compiled is None or len(compiled) == 1
    for eager, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # as torch.compile is first used
def test_blocks_of_one_structure_are_compiled_once_unless_they_are_cut() -> None:
    small = Small(samples=2)
    first, second, _ = small.jobs()
    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    for places, count in [({"": 0}, 1), ({"": 0, "model.layers.0.mlp": 1, "model.layers.1.mlp": 1}, 2)]:
        compiled: dict[object, object] = {}
        for job in (first, second):
            with job.skeleton.materialized(job.names, job.dtype):
                with on_devices(job.blocks(), Placement(layout(places), devices), compiled):  # type: ignore[arg-type]
                    pass
        assert len(compiled) == count


def test_hooks_of_accelerate_are_off_while_a_block_is_tuned_and_back_afterwards() -> None:
    """Offloaded weights are there inside, on a placement of ours; also when an exception passes."""
    job = Small(samples=2).jobs()[0]
    with job.skeleton.materialized(job.names, job.dtype):
        module = job.skeleton.block(0)
        expected = module.mlp.down_proj.weight.detach().clone()
        accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
        hook = module.mlp.down_proj._hf_hook
        assert module.mlp.down_proj.weight.device.type == "meta"
        for error in (None, ZeroDivisionError()):
            with (
                contextlib.suppress(ZeroDivisionError),
                on_devices(job.blocks(), Placement(layout({"": 0}), [torch.device("cpu")])) as group,
            ):
                (weights,) = group.float_weights()
                assert torch.equal(weights["model.layers.0.mlp.down_proj"], expected)
                assert "_hf_hook" not in vars(module.mlp.down_proj)
                if error:
                    raise error
            assert module.mlp.down_proj._hf_hook is hook and module.mlp.down_proj.weight.device.type == "meta"
        accelerate.hooks.remove_hook_from_submodules(module)
