"""Suspending accelerate's hooks and compressed-tensors' offload: real tensors inside, everything as it was outside."""

import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module, attach_align_device_hook
from accelerate.utils import OffloadedWeightsLoader
from compressed_tensors.offload import disable_offloading, disable_onloading, offload_module, set_onload_device
from compressed_tensors.offload.cache import DiskCache, OffloadCache
from compressed_tensors.offload.module import stage_module_offload
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from evenround.errors import UserError
from evenround.memory import foreign
from evenround.memory.foreign import suspended
from evenround.memory.simulate import SimulatedDevices


class Net(nn.Module):
    """Parameters at two depths, a buffer that is saved, one that is not, a module without anything and one reached twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), self.act)
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        self.register_buffer("scratch", torch.rand(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.act(self.first(x))) * self.scale + self.shift + self.scratch


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


X = torch.linspace(-1, 1, 12).view(3, 4)
IDS = torch.tensor([[0, 3, 5]])
Attach = Callable[[nn.Module, Path], Any]


def by_own_map(net: nn.Module, _: Path) -> None:
    attach_align_device_hook(net, execution_device=torch.device("cpu"), offload=True, offload_buffers=True)


def by_state_dict(net: nn.Module, _: Path) -> None:
    attach_align_device_hook(net, execution_device="cpu", offload=True, weights_map=dict(net.state_dict()))


def by_cpu_offload(net: nn.Module, _: Path) -> None:
    cpu_offload(net, execution_device=torch.device("cpu"), offload_buffers=True)


def by_disk_offload(net: nn.Module, folder: Path) -> None:
    disk_offload(net, folder / "offload", execution_device=torch.device("cpu"), offload_buffers=True)


def by_checkpoint(net: nn.Module, folder: Path) -> None:
    save_file({name: value.clone() for name, value in net.state_dict().items()}, folder / "model.safetensors")
    index = {
        name: {"safetensors_file": str(folder / "model.safetensors"), "weight_name": name, "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in net.state_dict().items()
    }
    loader = OffloadedWeightsLoader(index=index)
    attach_align_device_hook(net, execution_device=torch.device("cpu"), offload=True, weights_map=loader)


def by_one_hook(net: nn.Module, _: Path) -> None:
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    hook = AlignDevicesHook("cpu", offload=True, io_same_device=True, weights_map=weights, offload_buffers=True, place_submodules=True)
    add_hook_to_module(net, hook)


def by_sequence(net: nn.Module, _: Path) -> None:
    add_hook_to_module(net, ModelHook())
    add_hook_to_module(net, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(net, execution_device=torch.device("cpu"), offload=True)


def by_dispatch_to_one(net: nn.Module, _: Path) -> None:
    dispatch_model(net, {"": "cpu"}, force_hooks=True)


def by_dispatch_to_disk(net: nn.Module, folder: Path) -> None:
    first = next(name for name, _ in net.named_children())
    dispatch_model(net, {"": "cpu", first: "disk"}, main_device="cpu", offload_dir=folder / "offload")


def by_part(net: nn.Module, _: Path) -> None:
    children = [child for child in net.children() if list(child.parameters())]
    attach_align_device_hook(children[-1], execution_device=torch.device("cpu"), offload=True)


def by_ct_cpu(net: nn.Module, _: Path) -> None:
    set_onload_device(net, torch.device("cpu"))


def by_ct_disk(net: nn.Module, folder: Path) -> None:
    (folder / "ct").mkdir()
    for module in net.modules():
        offload_module(module, torch.device("cpu"), "disk", offload_dir=str(folder / "ct"))


def by_both(net: nn.Module, folder: Path) -> None:
    *first, last = [child for child in net.children() if list(child.parameters())]
    for module in last.modules():
        offload_module(module, "cpu", "cpu")
    for child in first:
        attach_align_device_hook(child, execution_device=torch.device("cpu"), offload=True)
    add_hook_to_module(net, AlignDevicesHook(io_same_device=True))


def by_both_on_one(net: nn.Module, _: Path) -> None:
    set_onload_device(net, "cpu")
    for module in net.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))


def by_cpu_offload_with_hook(net: nn.Module, _: Path) -> None:
    cpu_offload_with_hook(net, execution_device=torch.device("cpu"))


ALL: list[Attach] = [
    by_own_map, by_state_dict, by_cpu_offload, by_disk_offload, by_checkpoint, by_one_hook, by_sequence, by_dispatch_to_one,
    by_dispatch_to_disk, by_part, by_ct_cpu, by_ct_disk, by_both, by_both_on_one, by_cpu_offload_with_hook,
]  # fmt: skip


@pytest.fixture(params=ALL, ids=lambda attach: attach.__name__)
def attach(request: pytest.FixtureRequest) -> Attach:
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def net_with(attach: Attach, folder: Path) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """A hooked net, its values and its result before the hooks were on."""
    net = Net().eval()
    values = {name: value.detach().clone() for name, value in tensors(net)}
    result = net(X).detach()
    attach(net, folder)
    return net, values, result


def tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from net.named_parameters(remove_duplicate=False)
    yield from net.named_buffers(remove_duplicate=False)


def raw(mapping: Any) -> dict[str, Tensor]:
    return mapping.offloaded_values if isinstance(mapping, OffloadCache) else mapping


@dataclass(frozen=True)
class Photograph:
    """Everything that has to be the same objects afterwards, and where the tensors are. Keeps the objects, so that no id is used anew."""

    facts: list[Any]
    objects: list[Any] = field(compare=False, repr=False)


def photograph(net: nn.Module) -> Photograph:
    facts: list[Any] = []
    objects: list[Any] = []
    for module in net.modules():
        own = vars(module)
        hook = own.get("_hf_hook")
        parts = [part for part in (hook.hooks if isinstance(hook, SequentialHook) else [hook]) if part is not None]
        named = [own, raw(own["_parameters"]), raw(own["_buffers"]), *(vars(part) for part in parts)]
        named += [part.weights_map for part in parts if isinstance(part, AlignDevicesHook) and isinstance(part.weights_map, dict)]
        for mapping in named:
            objects += mapping.values()
            tensors = {name: (t.device, t.dtype, t.shape) for name, t in mapping.items() if isinstance(t, Tensor)}
            facts += [{name: id(value) for name, value in mapping.items()}, tensors]
    return Photograph(facts, objects)


def assert_plain(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    for module in net.modules():
        own = vars(module)
        assert not {"_hf_hook", "_old_forward", "_original_forward_func", "forward", "to", "cuda"} & own.keys()
        assert type(own["_parameters"]) is dict and type(own["_buffers"]) is dict
        assert all(type(value) is nn.Parameter for value in own["_parameters"].values() if value is not None)
    for name, value in tensors(net):
        assert value.device.type == "cpu" and value.dtype == values[name].dtype
        assert torch.equal(value, values[name]), name


def test_inside_all_is_plain_and_outside_all_is_as_before(attach: Attach, tmp_path: Path) -> None:
    net, values, result = net_with(attach, tmp_path)
    assert torch.equal(net(X), result)
    before = photograph(net)
    with suspended(net):
        assert_plain(net, values)
        assert torch.equal(net(X), result)
        assert all(parameter.requires_grad for parameter in net.parameters()) or attach is by_ct_disk  # its placeholders do not
    assert photograph(net) == before
    assert torch.equal(net(X), result)


def test_changes_in_place_and_by_assignment_are_kept(attach: Attach, tmp_path: Path) -> None:
    net, values, _ = net_with(attach, tmp_path)
    for _ in range(2):  # the second time what the first has left is read
        before = photograph(net)
        with suspended(net):
            with torch.no_grad():
                for _, value in tensors(net):
                    if value.is_floating_point():
                        value.mul_(2)
            net.first.weight = nn.Parameter(net.first.weight.detach() * 3)
            net.shift = net.shift + 1
            changed = {name: value.detach().clone() for name, value in tensors(net)}
            expected = net(X).detach()
        assert photograph(net) == before or attach is by_checkpoint
        assert torch.equal(net(X), expected)
        with suspended(net):
            assert_plain(net, changed)
    torch.testing.assert_close(changed["first.weight"], values["first.weight"] * 36)


def test_an_exception_inside_leaves_all_as_before(attach: Attach, tmp_path: Path) -> None:
    net, values, result = net_with(attach, tmp_path)
    before = photograph(net)
    with pytest.raises(KeyError, match="inside"), suspended(net):
        net.inner[0].weight.data.add_(1)
        raise KeyError("inside")
    assert photograph(net) == before or attach is by_checkpoint
    assert not torch.equal(net(X), result)
    with suspended(net):
        assert_plain(net, values | {"inner.0.weight": values["inner.0.weight"] + 1})


@pytest.mark.parametrize("where", ["materialized", "unhook"])
def test_an_exception_while_entering_leaves_all_as_before(
    attach: Attach, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, _, result = net_with(attach, tmp_path)
    before = photograph(net)
    right = vars(foreign)[where]
    calls = []

    def fails_on_the_second(argument: Any) -> Any:
        calls.append(argument)
        if len(calls) == 2 or where == "materialized":
            raise MemoryError("half way")
        return right(argument)

    monkeypatch.setattr(foreign, where, fails_on_the_second)
    if where == "unhook" and sum(bool({"_hf_hook", "_original_forward_func"} & vars(m).keys()) for m in net.modules()) < 2:
        monkeypatch.setattr(foreign, where, lambda module: (right(module), 1 / 0))
    with pytest.raises((MemoryError, ZeroDivisionError)), suspended(net):
        pytest.fail("entered")
    assert photograph(net) == before
    assert torch.equal(net(X), result)


def test_the_code_inside_may_move_and_cast(attach: Attach, tmp_path: Path) -> None:
    net, values, result = net_with(attach, tmp_path)
    before = photograph(net)
    with suspended(net):
        net.to(torch.float64)
        net.to("cpu", torch.float32)
        net.to(torch.bfloat16)
        net.to("meta")
        assert all(parameter.is_meta for parameter in net.parameters())
    assert photograph(net) == before or attach is by_checkpoint
    with suspended(net):
        assert_rounded(net, values)
    torch.testing.assert_close(net(X), result, rtol=0.1, atol=0.1)


def assert_rounded(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in tensors(net):
        torch.testing.assert_close(value.detach(), values[name], rtol=0.01, atol=0.01)


def test_without_hooks_nothing_is_touched() -> None:
    net = Net()
    held = {id(module): (vars(module)["_parameters"], vars(module)["_buffers"]) for module in net.modules()}
    with suspended(net):
        net.first.weight = nn.Parameter(torch.zeros(2, 4))
        net.extra = nn.Parameter(torch.zeros(1))
    assert held == {id(module): (vars(module)["_parameters"], vars(module)["_buffers"]) for module in net.modules()}
    assert net.first.weight.shape == (2, 4)
    with torch.device("meta"):
        skeleton = Net()
    with suspended(skeleton), suspended(nn.ReLU()):
        assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_neither_library_is_needed_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("accelerate", "compressed_tensors")]:
        monkeypatch.setitem(sys.modules, name, None)
    with suspended(Net()):
        pass
    with pytest.raises(ImportError):
        import accelerate.hooks  # noqa: F401


@pytest.mark.parametrize(
    "attach_empty", [lambda m: add_hook_to_module(m, AlignDevicesHook("cpu")), lambda m: offload_module(m, "cpu", "cpu")]
)
def test_a_module_without_tensors(attach_empty: Callable[[nn.Module], Any]) -> None:
    module = nn.Sequential(nn.ReLU(), nn.Identity())
    for inner in module.modules():
        attach_empty(inner)
    before = photograph(module)
    with suspended(module):
        assert_plain(module, {})
        assert torch.equal(module(X), X.relu())
    assert photograph(module) == before


@pytest.mark.parametrize(
    "attach", [a for a in ALL if a not in (by_disk_offload, by_checkpoint, by_ct_disk, by_one_hook)], ids=lambda a: a.__name__
)
def test_tied_stay_tied(attach: Attach, tmp_path: Path) -> None:
    net = Tied()
    attach(net, tmp_path)
    before = photograph(net)
    with suspended(net):
        assert net.head.weight is net.embed.weight
        net.embed.weight.data.mul_(2)
        net.head.weight = nn.Parameter(net.head.weight.detach() + 1)
        expected = nn.functional.linear(net.head.weight[IDS], net.head.weight).detach()
    assert photograph(net) == before
    with suspended(net):
        assert net.head.weight is net.embed.weight
        assert torch.equal(net(IDS), expected)
        net.double()
    assert photograph(net) == before
    assert torch.equal(net(IDS), expected)


def test_tied_on_disk_twice_are_two(tmp_path: Path) -> None:
    net = Tied()
    disk_offload(net, tmp_path / "offload", execution_device=torch.device("cpu"))
    with suspended(net):
        assert net.head.weight is not net.embed.weight
        assert torch.equal(net.head.weight, net.embed.weight)


def test_a_tie_of_which_accelerate_offloads_one_name_only(tmp_path: Path) -> None:
    net = Tied()
    weight = net.embed.weight
    expected = net(IDS)
    weights = {"embed.weight": weight.detach(), "head.weight": weight.detach()}
    add_hook_to_module(net, AlignDevicesHook("cpu", offload=True, weights_map=weights, place_submodules=True))
    assert net.embed.weight.is_meta and net.head.weight is weight
    with suspended(net):
        assert net.embed.weight is net.head.weight is weight
        net.to(torch.float64).to(torch.float32)
        weight.data = weight.data + 1
    assert net.embed.weight.is_meta and net.head.weight is weight
    assert weight.data_ptr() == weights["embed.weight"].data_ptr()
    assert not torch.equal(net(IDS), expected)


def test_a_map_without_a_name_that_needs_none() -> None:
    net = Tied()
    weights = {"embed.weight": net.embed.weight.detach()}
    add_hook_to_module(net, AlignDevicesHook("cpu", offload=True, weights_map=weights, place_submodules=True))
    before = photograph(net)
    with suspended(net):
        assert net.embed.weight is net.head.weight
        net.embed.weight.data.zero_()
    assert photograph(net) == before
    assert not weights["embed.weight"].any() and not net.head.weight.any()


def test_the_same_module_twice() -> None:
    layer = nn.Linear(4, 4)
    net = nn.Sequential(layer, layer)
    expected = net(X)
    attach_align_device_hook(layer, execution_device=torch.device("cpu"), offload=True)
    before = photograph(net)
    with suspended(net):
        assert torch.equal(net(X), expected)
    assert photograph(net) == before


def test_one_inside_another(tmp_path: Path) -> None:
    net, _, result = net_with(by_both, tmp_path)
    before = photograph(net)
    with suspended(net.inner):
        partly = photograph(net)
        with suspended(net), suspended(net.inner):
            assert torch.equal(net(X), result)
        assert photograph(net) == partly
    assert photograph(net) == before


def test_a_store_on_disk_is_written_only_when_bits_change(tmp_path: Path) -> None:
    net, values, _ = net_with(by_disk_offload, tmp_path)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "offload").iterdir()}
    with suspended(net):
        net.first.bias = nn.Parameter(torch.full((4,), float("nan")))
    changed = {path.name for path, stamp in written.items() if path.stat().st_mtime_ns != stamp}
    assert changed == {"first.bias.dat"}
    with suspended(net):
        assert net.first.bias.isnan().all()
        assert torch.equal(net.first.weight, values["first.weight"])
    assert {path.name for path, stamp in written.items() if path.stat().st_mtime_ns != stamp} == changed


def test_a_checkpoint_behind_the_hooks_is_never_written(tmp_path: Path) -> None:
    net, values, _ = net_with(by_checkpoint, tmp_path)
    loader = net.first._hf_hook.weights_map.dataset
    content = (tmp_path / "model.safetensors").read_bytes()
    with suspended(net):
        net.first.weight.data.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == content
    assert list(loader.state_dict) == ["first.weight"]
    assert torch.equal(net(X), net(torch.zeros_like(X)))


def test_a_checkpoint_behind_a_disk_cache_is_never_written(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4, bias=False)
    save_file({"w": layer.weight.detach() + 1}, tmp_path / "model.safetensors")
    offload_module(layer, "cpu", "disk", offload_dir=str(tmp_path))
    placeholder = layer._parameters.offloaded_values["weight"]
    Path(DiskCache.index[placeholder]["safetensors_file"]).unlink()
    info = {"safetensors_file": str(tmp_path / "model.safetensors"), "weight_name": "w", "dtype": "float32"}
    DiskCache.create_checkpoint_symlink(placeholder, info, tmp_path)
    content = load_file(tmp_path / "model.safetensors")["w"]
    with suspended(layer):
        assert torch.equal(layer.weight, content)
        layer.weight.data.zero_()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], content)
    assert layer._parameters.offloaded_values["weight"] is placeholder and placeholder.is_meta
    assert not layer.weight.any()


def test_the_memory_of_a_store_on_the_executing_device_is_shared() -> None:
    layer = nn.Linear(4, 4)
    weight = layer.weight
    by_own_map(layer, Path())
    with suspended(layer):
        assert layer.weight is not weight and layer.weight.data_ptr() == weight.data_ptr()
        layer.double()
        assert weight.dtype == torch.float32


def test_values_are_read_in_the_dtype_of_the_module_and_written_in_that_of_the_store() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).bfloat16()
    weights = {"0.weight": torch.zeros(4, 4), "1.weight": torch.ones(4, 4)}
    attach_align_device_hook(net, execution_device="cpu", offload=True, weights_map=weights)
    with suspended(net):
        assert net[0].weight.dtype == torch.bfloat16 and not net[0].weight.any() and net[1].weight.all()
        net[0].weight = nn.Parameter(torch.full((4, 4), 0.1))
    assert weights["0.weight"].dtype == torch.float32 and torch.equal(weights["0.weight"], torch.full((4, 4), 0.1))


@pytest.mark.parametrize("switch", [disable_onloading, disable_offloading])
@pytest.mark.parametrize("attach", [by_ct_cpu, by_ct_disk])
def test_global_switches_of_the_caches_do_not_matter(attach: Attach, switch: Callable[[], Any], tmp_path: Path) -> None:
    net, values, result = net_with(attach, tmp_path)
    with switch():
        seen = net.first.weight
        with suspended(net):
            assert_plain(net, values)
            net.first.weight = nn.Parameter(values["first.weight"] + 1)
        if switch is disable_offloading:
            assert net.first.weight is seen and torch.equal(seen, values["first.weight"] + 1)
    assert torch.equal(net.first.weight, values["first.weight"] + 1)


def test_staged_caches(tmp_path: Path) -> None:
    net, values, result = net_with(by_ct_disk, tmp_path)
    for module in net.modules():
        stage_module_offload(module)
    before = photograph(net)
    with suspended(net):
        assert torch.equal(net.first.weight, values["first.weight"])
        net.first.weight = nn.Parameter(values["first.weight"] + 1)
    assert photograph(net) == before
    assert torch.equal(net.first.weight, values["first.weight"] + 1)


class Lazy(Mapping[str, Tensor]):
    """Values made anew at each access; takes none."""

    def __getitem__(self, key: str) -> Tensor:
        if key != "weight":
            raise KeyError(key)
        return torch.ones(4, 4)

    def __iter__(self) -> Iterator[str]:
        return iter(("weight",))

    def __len__(self) -> int:
        return 1


def test_a_map_that_takes_no_values_is_an_error_only_if_they_changed() -> None:
    layer = nn.Linear(4, 4, bias=False)
    attach_align_device_hook(layer, execution_device="cpu", offload=True, weights_map=Lazy())
    before = photograph(layer)
    with suspended(layer):
        assert layer.weight.all()
    with pytest.raises(ValueError, match="cannot keep them: weight"), suspended(layer):
        layer.weight.data.zero_()
    assert photograph(layer) == before


def test_a_map_that_takes_assignments() -> None:
    layer = nn.Linear(4, 4, bias=False)
    weights = UserDict({"weight": torch.ones(4, 4)})
    add_hook_to_module(layer, AlignDevicesHook(None, offload=True, weights_map=weights))
    with suspended(layer):
        layer.weight = nn.Parameter(torch.zeros(4, 4))
    assert layer.weight.is_meta and not weights["weight"].any()


def test_a_graph_module_whose_class_has_the_wrapper() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    expected = graph(X)
    add_hook_to_module(graph, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    wrapper = type(graph).forward
    before = photograph(graph)
    with suspended(graph):
        assert torch.equal(graph(X), expected)
    assert photograph(graph) == before and type(graph).forward is wrapper
    assert torch.equal(graph(X), expected)


@pytest.mark.parametrize("attach", [by_state_dict, by_disk_offload, by_ct_cpu, by_ct_disk])
def test_new_names_lost_names_and_new_shapes_cannot_be_kept(attach: Attach, tmp_path: Path) -> None:
    net, values, result = net_with(attach, tmp_path)
    before = photograph(net)

    def change() -> None:
        net.first.extra = nn.Parameter(torch.zeros(1))
        del net.first.bias
        net.inner[0].weight = nn.Parameter(torch.zeros(2, 4))

    with pytest.raises(ValueError, match=r"so an offloading module cannot keep them: first\.bias, first\.extra, inner\.0\.weight"):
        with suspended(net):
            change()
    assert photograph(net) == before
    assert torch.equal(net(X), result)
    before = photograph(net)
    with pytest.raises(KeyError, match="goes first"), suspended(net):
        change()
        raise KeyError("goes first")
    assert photograph(net) == before


def test_a_module_without_offload_keeps_new_names_and_shapes(tmp_path: Path) -> None:
    net, _, _ = net_with(by_dispatch_to_one, tmp_path)
    with suspended(net):
        net.first.extra = nn.Parameter(torch.zeros(1))
        net.first.weight = nn.Parameter(torch.zeros(2, 4))
        del net.first.bias
    assert set(net.first._parameters) == {"weight", "extra"} and net.first.weight.shape == (2, 4)
    assert "_hf_hook" in vars(net.first)


def test_a_tensor_that_only_an_outer_hook_can_load_is_refused(tmp_path: Path) -> None:
    net, _, result = net_with(by_one_hook, tmp_path)
    add_hook_to_module(net.first, ModelHook())
    before = photograph(net)
    with pytest.raises(
        UserError, match="weight is on the meta device and no hook inside the module given holds its value; suspend hooks on"
    ):
        with suspended(net.first):
            pytest.fail("entered")
    assert photograph(net) == before
    assert torch.equal(net(X), result)


def test_a_failing_store_still_brings_the_hooks_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, _, _ = net_with(by_disk_offload, tmp_path)
    before = photograph(net)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("accelerate.utils.offload_weight", full)
    add_hook_to_module(net.act, ModelHook())
    net.act.plain = nn.Parameter(torch.ones(2))
    before = photograph(net)
    with pytest.raises(OSError, match="No space left"), suspended(net):
        net.double()
        net.first.weight.data.zero_()
    assert photograph(net) == before
    assert net.act.plain.dtype == torch.float32


def test_attributes_of_parameters_and_frozen_ones() -> None:
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    offload_module(layer, "cpu", "cpu")
    layer._parameters.offloaded_values["weight"].loader = "theirs"
    with suspended(layer):
        assert not layer.weight.requires_grad and layer.bias.requires_grad
        assert vars(layer.weight) == {"loader": "theirs"}


def test_another_device_executes() -> None:
    with SimulatedDevices([10**6, 10**6]):
        zero, one = torch.device("cpu", 0), torch.device("cpu", 1)
        net = Tied()
        expected = net(IDS).detach()
        kept = net.head.weight
        attach_align_device_hook(net, execution_device=zero, offload=True)
        before = photograph(net)
        with suspended(net):
            assert net.head.weight is net.embed.weight and net.head.weight.device == zero
            assert torch.equal(net(IDS.to(zero)).cpu(), expected)
            net.to(one)
            net.head.weight = nn.Parameter(net.head.weight * 2)
        assert photograph(net) == before
        assert kept.device == torch.device("cpu")
        assert torch.equal(nn.functional.linear(kept[IDS], kept), expected * 4)


@torch.no_grad()
def test_a_tensor_that_is_not_offloaded_comes_back_to_its_device() -> None:
    with SimulatedDevices([10**6, 10**6]):
        zero, one = torch.device("cpu", 0), torch.device("cpu", 1)
        net = Net().to(zero).eval()
        add_hook_to_module(net, AlignDevicesHook(zero, place_submodules=True))
        expected = net(X.to(zero)).cpu()
        before = photograph(net)
        with suspended(net):
            net.to(one)
            assert torch.equal(net(X.to(one)).cpu(), expected)
        assert photograph(net) == before
        assert torch.equal(net(X.to(zero)).cpu(), expected)


def test_gradients_flow_inside(tmp_path: Path) -> None:
    net, _, _ = net_with(by_cpu_offload, tmp_path)
    with suspended(net):
        net(X).sum().backward()
        assert net.first.weight.grad is not None
    assert net.first.weight.is_meta


def test_a_forward_that_the_module_had_of_its_own_is_back_inside() -> None:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x + 1  # type: ignore[method-assign]
    own = layer.forward
    by_own_map(layer, Path())
    with suspended(layer):
        assert vars(layer)["forward"] is own
    assert vars(layer)["forward"] is not own
