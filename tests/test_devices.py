"""Wishes for devices, their memory, and the choice of precision, with accelerators that are made up."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from evenround.errors import UserError
from evenround.memory import devices
from evenround.memory.devices import (
    MARGINS,
    Device,
    Machine,
    attention,
    available_host_bytes,
    free_bytes,
    margin,
    native_bfloat16,
    parse_devices,
    peak_bytes,
    pick_compute_dtype,
    release_host_memory,
)
from evenround.memory.wishes import ACCELERATORS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HOST, FREE = 48 * 2**30, 10 * 2**30
GIB = 2**30
MachineOf = Callable[[str | None, int], None]


def set_up(patch: pytest.MonkeyPatch, kind: str | None, count: int) -> None:
    """A machine with `count` accelerators; number n has 10 + n GiB free, the host 48 GiB."""
    patch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    patch.setattr(torch.accelerator, "current_accelerator", lambda: None if kind is None else torch.device(kind))
    patch.setattr(torch.accelerator, "device_count", lambda: count)
    patch.setattr(devices, "free_bytes", lambda device: HOST if device.type == "cpu" else FREE + device.index * GIB)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> MachineOf:
    """`machine("xpu", 2)`: one with two XPUs; `machine(None, 0)`: only the CPU."""
    return lambda kind, count: set_up(monkeypatch, kind, count)


def summary(made: Machine) -> list[tuple[str, float, str | None]]:
    """Name, GiB and torch device of each device."""
    return [(device.name, device.capacity / GIB, None if device.where is None else str(device.where)) for device in made.devices]


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("auto", "xpu:0"),
        ("cpu", "cpu"),
        ("CPU", "cpu"),
        ("xpu", "xpu:0"),
        (" xpu:1 ", "xpu:1"),
        ("0", "xpu:0"),
        ("1", "xpu:1"),
        ("1,0", "xpu:1"),
        ("2x80GiB", "xpu:0"),
        ("xpu:1=3GiB", "xpu:1"),
        ("cpu=8GiB", "cpu"),
        ("mlp:1,attn:cpu", "xpu:1"),
    ],
)
def test_what_computes_on_one_device_takes_the_first(machine: MachineOf, text: str, device: str) -> None:
    machine("xpu", 2)
    assert parse_devices(text).devices[0].where == torch.device(device)


def test_auto_without_an_accelerator_is_the_cpu(machine: MachineOf) -> None:
    machine(None, 0)
    assert parse_devices("auto").devices[0].where == parse_devices("cpu").devices[0].where == CPU
    assert parse_devices("auto") == Machine((Device("cpu", "cpu", HOST, CPU),))


def test_a_driver_without_accelerators_is_no_accelerator(machine: MachineOf) -> None:
    machine("cuda", 0)
    assert parse_devices("auto").devices[0].where == CPU


HERE = [
    ("auto", [("cuda:0", 10, "cuda:0"), ("cuda:1", 11, "cuda:1"), ("cuda:2", 12, "cuda:2")]),
    (" Auto ", [("cuda:0", 10, "cuda:0"), ("cuda:1", 11, "cuda:1"), ("cuda:2", 12, "cuda:2")]),
    ("cuda", [("cuda:0", 10, "cuda:0")]),
    ("CUDA : 1", [("cuda:1", 11, "cuda:1")]),
    ("0", [("cuda:0", 10, "cuda:0")]),
    (2, [("cuda:2", 12, "cuda:2")]),
    (torch.device("cuda", 1), [("cuda:1", 11, "cuda:1")]),
    (torch.device("cuda"), [("cuda:0", 10, "cuda:0")]),
    (torch.device("cpu"), [("cpu", 48, "cpu")]),
    ("0,1,2", [("cuda:0", 10, "cuda:0"), ("cuda:1", 11, "cuda:1"), ("cuda:2", 12, "cuda:2")]),
    ("2 , 0", [("cuda:2", 12, "cuda:2"), ("cuda:0", 10, "cuda:0")]),
    ([2, 0], [("cuda:2", 12, "cuda:2"), ("cuda:0", 10, "cuda:0")]),
    (("cuda:2", torch.device("cuda", 0), 1), [("cuda:2", 12, "cuda:2"), ("cuda:0", 10, "cuda:0"), ("cuda:1", 11, "cuda:1")]),
    (["auto"], [("cuda:0", 10, "cuda:0"), ("cuda:1", 11, "cuda:1"), ("cuda:2", 12, "cuda:2")]),
    ("cuda:0,cuda:1", [("cuda:0", 10, "cuda:0"), ("cuda:1", 11, "cuda:1")]),
    ("cuda:1,2", [("cuda:1", 11, "cuda:1"), ("cuda:2", 12, "cuda:2")]),
    ("cpu", [("cpu", 48, "cpu")]),
    ("cpu=8GiB", [("cpu", 8, "cpu")]),
    ("cpu = 80 GiB", [("cpu", 48, "cpu")]),
    ("2x4GiB", [("cuda:0", 4, "cuda:0"), ("cuda:1", 4, "cuda:1")]),
    ("cuda:2x80gib", [("cuda:0", 10, "cuda:0"), ("cuda:1", 11, "cuda:1")]),
    ("2 X 10.5 GiB", [("cuda:0", 10, "cuda:0"), ("cuda:1", 10.5, "cuda:1")]),
    ("cuda:0=70GiB,cuda:1=2GiB", [("cuda:0", 10, "cuda:0"), ("cuda:1", 2, "cuda:1")]),
    ("0=1GiB,1=2GiB", [("cuda:0", 1, "cuda:0"), ("cuda:1", 2, "cuda:1")]),
    ("cuda:0=1GiB,cuda:1", [("cuda:0", 1, "cuda:0"), ("cuda:1", 11, "cuda:1")]),
    ("cuda=1GiB", [("cuda:0", 1, "cuda:0")]),
    ("0=1073741824", [("cuda:0", 1, "cuda:0")]),
]


@pytest.mark.parametrize(("wish", "expected"), HERE)
def test_a_run_uses_what_is_here_up_to_what_is_free(machine: MachineOf, wish: object, expected: list[object]) -> None:
    machine("cuda", 3)
    made = parse_devices(wish)  # type: ignore[arg-type]
    assert summary(made) == expected
    assert made.layers == {} and made.here and not made.simulated
    assert {device.kind for device in made.devices} == {expected[0][0].partition(":")[0]}  # type: ignore[index]


def test_a_type_carries_on_to_numbers(machine: MachineOf) -> None:
    machine("xpu", 2)
    assert summary(parse_devices("xpu:0,1")) == summary(parse_devices("0,1")) == summary(parse_devices("auto"))
    machine("cuda", 2)
    assert summary(parse_devices("xpu:0=1GiB,1=2GiB", planning=True)) == [("xpu:0", 1, None), ("xpu:1", 2, None)]


PLANNED = [
    ("4x80GiB", [("cuda:0", 80, None), ("cuda:1", 80, None), ("cuda:2", 80, None), ("cuda:3", 80, None)]),
    ("xpu:2x24GiB", [("xpu:0", 24, None), ("xpu:1", 24, None)]),
    ("cuda:2x24GiB", [("cuda:0", 24, None), ("cuda:1", 24, None)]),
    ("cuda:0=70GiB,cuda:1=24GiB", [("cuda:0", 70, None), ("cuda:1", 24, None)]),
    ("2=70GiB,6=24GiB", [("cuda:2", 70, None), ("cuda:6", 24, None)]),
    ("hpu=96GiB", [("hpu:0", 96, None)]),
    ("cpu=512GiB", [("cpu", 512, None)]),
    ("cpu", [("cpu", 48, "cpu")]),
    ("auto", [("cpu", 48, "cpu")]),
]


@pytest.mark.parametrize(("wish", "expected"), PLANNED)
def test_a_plan_takes_capacities_as_said(machine: MachineOf, wish: str, expected: list[object]) -> None:
    machine(None, 0)
    made = parse_devices(wish, planning=True)
    assert summary(made) == expected
    assert made.here is (expected[0][2] is not None)  # type: ignore[index]


def test_a_plan_is_for_other_cards_than_those_here(machine: MachineOf) -> None:
    machine("xpu", 1)
    assert summary(parse_devices("2x80GiB", planning=True)) == [("xpu:0", 80, None), ("xpu:1", 80, None)]
    machine("cuda", 2)
    mixed = parse_devices("cuda:0=70GiB,cuda:1", planning=True)
    assert summary(mixed) == [("cuda:0", 70, None), ("cuda:1", 11, "cuda:1")] and not mixed.here
    assert summary(parse_devices("1", planning=True)) == [("cuda:1", 11, "cuda:1")]


@pytest.mark.parametrize("planning", [False, True])
@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("sim:256MiB", [("sim:0", 0.25, "cpu:0")]),
        (" SIM: 1x256MiB ", [("sim:0", 0.25, "cpu:0")]),
        ("sim:3x1GiB", [("sim:0", 1, "cpu:0"), ("sim:1", 1, "cpu:1"), ("sim:2", 1, "cpu:2")]),
        ("sim:0=1GiB,1=2GiB", [("sim:0", 1, "cpu:0"), ("sim:1", 2, "cpu:1")]),
        ("sim:1=1GiB,sim:0=2GiB", [("sim:1", 1, "cpu:1"), ("sim:0", 2, "cpu:0")]),
        ("sim:1073741824", [("sim:0", 1, "cpu:0")]),
        ("sim=1GiB", [("sim:0", 1, "cpu:0")]),
    ],
)
def test_simulated_devices(machine: MachineOf, planning: bool, wish: str, expected: list[object]) -> None:
    machine("cuda", 1)
    made = parse_devices(wish, planning=planning)
    assert summary(made) == expected
    assert made.simulated and made.here


@pytest.mark.parametrize(
    ("wish", "names", "layers"),
    [
        ("mlp.down_proj:1,self_attn:cuda:0", ["cuda:0", "cuda:1"], {"mlp.down_proj": 1, "self_attn": 0}),
        (" mlp.down_proj : 2 , Attn : CUDA : 1 ", ["cuda:1", "cuda:2"], {"mlp.down_proj": 1, "Attn": 0}),
        ("mlp:1", ["cuda:1"], {"mlp": 0}),
        ("mlp:cuda", ["cuda:0"], {"mlp": 0}),
        ("mlp:cpu,attn:2", ["cuda:2", "cpu"], {"mlp": 1, "attn": 0}),
        ("mlp:cpu", ["cpu"], {"mlp": 0}),
        (r".*(?:up|gate)_proj:1,(?i:Q)\:x[:]:0", ["cuda:0", "cuda:1"], {r".*(?:up|gate)_proj": 1, r"(?i:Q)\:x[:]": 0}),
        (
            {"mlp.down_proj": 1, "self_attn": "cuda:0", r".*up_proj": torch.device("cuda", 1), "norm": "cpu"},
            ["cuda:0", "cuda:1", "cpu"],
            {"mlp.down_proj": 1, "self_attn": 0, r".*up_proj": 1, "norm": 2},
        ),
        ({"cuda": 0, "gpu": 1}, ["cuda:0", "cuda:1"], {"cuda": 0, "gpu": 1}),
        (r'{"layers\\.\\d{1,2}": 1, "mlp": "cuda:0"}', ["cuda:0", "cuda:1"], {r"layers\.\d{1,2}": 1, "mlp": 0}),
    ],
)
def test_maps_of_layers(machine: MachineOf, wish: object, names: list[str], layers: dict[str, int]) -> None:
    machine("cuda", 3)
    made = parse_devices(wish)  # type: ignore[arg-type]
    assert [device.name for device in made.devices] == names
    assert list(made.layers.items()) == list(layers.items())
    assert made.here and [str(device.where) for device in made.devices] == names


def message(wish: object, planning: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        parse_devices(wish, planning=planning, flag="--device_map")  # type: ignore[arg-type]
    return str(caught.value)


FORMS = "use auto, cpu, an accelerator such as cuda:0, or its number, several with commas between"
JSON = 'a JSON object such as {"mlp.down_proj": 1}'
TYPES = "Types: auto, cpu, sim, cuda, xpu, mps, hpu, mtia; a layer's rule is written mlp:0"
CPU_BESIDE = "the CPU works beside accelerators only for layers that a map puts there, such as mlp:cpu; name one of them"
NO_SIZE = "has no capacity; write sim:256MiB, sim:4x256MiB or sim:0=1GiB,1=2GiB"
AUTO = "auto stands alone, without numbers, capacities and other devices"
ALONE = "stands alone, for accelerators; else give each device its own, such as 0=80GiB,1=24GiB or cpu=8GiB"
COMMA = "there is nothing before or after a comma; leave that comma out"
NOT_HERE = "here (cuda:0 to cuda:1); use auto for what is here"
WRONG = [
    ("", f"is empty; {FORMS}"),
    ("  ", f"is empty; {FORMS}"),
    ([], f"is empty; {FORMS}"),
    ("0,", COMMA),
    (",0", COMMA),
    ("0,,1", COMMA),
    (["0", ""], COMMA),
    ("cdua", f"unknown type of device 'cdua'; did you mean 'cuda'? {TYPES}"),
    ("cuda0", f"unknown type of device 'cuda0'; did you mean 'cuda'? {TYPES}"),
    ("gpu", f"unknown type of device 'gpu'; did you mean 'cuda'? {TYPES}"),
    ("zzz", f"unknown type of device 'zzz'. {TYPES}"),
    ("mlp=cuda:1", f"unknown type of device 'mlp'; did you mean 'mps'? {TYPES}"),
    (torch.device("meta"), f"unknown type of device 'meta'; did you mean 'mtia'? {TYPES}"),
    ("CDUA:0", f"unknown type of device 'cdua'; did you mean 'cuda'? {TYPES}, and where its name looks like a type, in {JSON}"),
    ("gpu:0", f"unknown type of device 'gpu'; did you mean 'cuda'? {TYPES}, and where its name looks like a type, in {JSON}"),
    ("cuda:", "'cuda:' is not understood: a number is missing after the ':'; write cuda:0"),
    ("cuda:=1GiB", "'cuda:=1GiB' is not understood: a number is missing after the ':'; write cuda:0"),
    ("cuda:zero", f"'cuda:zero' is not understood; {FORMS}"),
    ("cuda:0:1", f"'cuda:0:1' is not understood; {FORMS}"),
    ("=1GiB", f"'=1GiB' is not understood; {FORMS}"),
    ("mlp.down", f"'mlp.down' is not understood; {FORMS}"),
    ("1 0", f"'1 0' is not understood; {FORMS}"),
    ("9999999999", f"'9999999999' is not understood; {FORMS}"),
    ("128", "'128': devices are numbered from 0 to 127"),
    ("-1", "'-1': devices are numbered from 0"),
    (-1, "'-1': devices are numbered from 0"),
    ("cuda:-1", "'cuda:-1': devices are numbered from 0"),
    ({"mlp": -1}, "'-1': devices are numbered from 0"),
    ("2", f"there is no cuda:2 {NOT_HERE}"),
    ("xpu:0", f"there is no xpu:0 {NOT_HERE}"),
    ("4x24GiB", f"there is no cuda:2 {NOT_HERE}"),
    ("cuda:7=70GiB", f"there is no cuda:7 {NOT_HERE}"),
    ({"mlp": 5}, f"there is no cuda:5 {NOT_HERE}"),
    ("0,0", "names cuda:0 twice; name each device once"),
    ("cuda,0", "names cuda:0 twice; name each device once"),
    ("cuda:1=1GiB,1", "names cuda:1 twice; name each device once"),
    ("cpu,cpu", "names cpu twice; name each device once"),
    ("cuda:0,cpu", CPU_BESIDE),
    ("cpu,0", CPU_BESIDE),
    ("cuda:0,xpu:1", "mixes cuda and xpu, which do not work together; name devices of one type"),
    ({"mlp": "cuda:0", "attn": "xpu:1", "norm": "cpu"}, "mixes cuda and xpu, which do not work together; name devices of one type"),
    ("sim:0=1GiB,cuda:1", "mixes simulated and real devices; name one sort"),
    ("cpu,sim:0=1GiB", "mixes simulated and real devices; name one sort"),
    ("sim", f"'sim' {NO_SIZE}"),
    ("sim:1", f"'sim:1' {NO_SIZE}"),
    ("sim:0=1GiB,1", f"'1' {NO_SIZE}"),
    ("sim:1=1GiB", "1 simulated devices must be numbered 0 to 0, as in sim:0=1GiB,1=2GiB"),
    ("sim:0=1GiB,2=1GiB", "2 simulated devices must be numbered 0 to 1, as in sim:0=1GiB,1=2GiB"),
    ("sim:0=1GiB,0=1GiB", "names sim:0 twice; name each device once"),
    ("sim:1GiB,1GiB", f"'sim:1GiB' is not understood; {FORMS}"),
    ("auto,0", AUTO),
    ("auto:0", AUTO),
    ("auto=8GiB", AUTO),
    ({"mlp": "auto"}, AUTO),
    ("2x1GiB,0", f"'2x1GiB' {ALONE}"),
    ("cpu:2x1GiB", f"'cpu:2x1GiB' {ALONE}"),
    ("cpu:0", "'cpu:0': there is one CPU, without a number; write cpu"),
    (torch.device("cpu", 0), "'cpu:0': there is one CPU, without a number; write cpu"),
    ("0x1GiB", "there can be 1 to 128 devices, not 0"),
    ("129x1GiB", "there can be 1 to 128 devices, not 129"),
    ("4x", "'4x' ends where a capacity should follow; add one, such as 80GiB"),
    ("sim:4x", "'sim:4x' ends where a capacity should follow; add one, such as 80GiB"),
    ("0=", "'0=' ends where a capacity should follow; add one, such as 80GiB"),
    ("4x80", "'4x80': the capacity 80 has no unit; write 80GiB"),
    ("0=1.5", "'0=1.5': the capacity 1.5 has no unit; write 1.5GiB"),
    ("0=70", "'0=70': the capacity 70 has no unit; write 70GiB"),
    ("sim:1000", "'sim:1000': the capacity 1000 has no unit; write 1000GiB"),
    (True, "True is not a device; give text, a number or a torch.device"),
    (1.5, "1.5 is not a device; give text, a number or a torch.device"),
    (None, "None is not a device; give text, a number or a torch.device"),
    (b"0", "b'0' is not a device; give text, a number or a torch.device"),
    ([0, False], "False is not a device; give text, a number or a torch.device"),
    ([[0]], "[0] is not a device; give text, a number or a torch.device"),
    ({"mlp": True}, "True is not a device; give text, a number or a torch.device"),
    ({"mlp": None}, "None is not a device; give text, a number or a torch.device"),
    ('{"mlp": true}', "True is not a device; give text, a number or a torch.device"),
    ('{"mlp": {"up": 1}}', "[('up', 1)] is not a device; give text, a number or a torch.device"),
    ('{"mlp": 1', f"not {JSON}: Expecting ',' delimiter: line 1 column 10 (char 9)"),
    ({}, f"is a map without rules; give {JSON}, or {FORMS[4:]}"),
    ("{}", f"is a map without rules; give {JSON}, or {FORMS[4:]}"),
    ({0: "24GiB"}, "the key 0 is not text; a map goes from layers' names to devices, capacities are written 0=24GiB"),
    ({"": 1}, "a layer's name is missing before 1; write mlp.down_proj:1"),
    (":1", "a layer's name is missing before '1'; write mlp.down_proj:1"),
    ("mlp:", "'mlp' has no device after it; write mlp:0"),
    ("mlp:0,mlp:1", "'mlp' has two devices; give it one"),
    ('{"mlp": 0, "mlp": 1}', "'mlp' has two devices; give it one"),
    ("(mlp:1", f"'(mlp' is not a regex (missing ), unterminated subpattern at position 0); one that holds a comma is given in {JSON}"),
    ({"*": 1}, f"'*' is not a regex (nothing to repeat at position 0); one that holds a comma is given in {JSON}"),
    ("cuda:0,mlp:1", f"'cuda:0' is not layer:device as the others are; a regex that holds a comma is given in {JSON}"),
    (r"a\d{1,2}:1", rf"'a\\d{{1' is not layer:device as the others are; a regex that holds a comma is given in {JSON}"),
    ("mlp:sim:1", "'mlp' cannot be put on 'sim:1': a map names accelerators or cpu, not simulated devices"),
    ({"mlp": "sim:1"}, "'mlp' cannot be put on 'sim:1': a map names accelerators or cpu, not simulated devices"),
    ("mlp:1=2GiB", "'mlp' has '1=2GiB': a map's devices take no capacity; write one device, such as cuda:0"),
    ({"mlp": "cuda:2x1GiB"}, "'mlp' has 'cuda:2x1GiB': a map's devices take no capacity; write one device, such as cuda:0"),
    ("mlp:cdua:1", f"unknown type of device 'cdua'; did you mean 'cuda'? {TYPES}"),
    ({"mlp": "0,1"}, f"'0,1' is not understood; {FORMS}"),
]


@pytest.mark.parametrize(("wish", "text"), WRONG)
def test_what_is_wrong_is_said_with_the_flag_and_the_wish(machine: MachineOf, wish: object, text: str) -> None:
    machine("cuda", 2)
    assert message(wish) == f"--device_map {wish!r}: {text}"


@pytest.mark.parametrize(
    "wish", ["4x80XB", "0=0GiB", "cuda:0=big", "sim:big", "sim:-1", "sim:0=0", "cpu=-8GiB", "cuda:1=mlp", "sim:1GiB=2GiB"]
)
def test_capacities_that_cannot_be_read(machine: MachineOf, wish: str) -> None:
    machine("cuda", 2)
    size = re.split("x|=|:(?!.*=)", wish, maxsplit=1)[1]
    if wish == "sim:1GiB=2GiB":
        assert message(wish) == f"--device_map {wish!r}: {wish!r} is not understood; {FORMS}"
        return
    assert message(wish).startswith(f"size {size!r} (--device_map {wish!r}) cannot be read; write a positive number and a unit, such as")


def test_what_is_not_here_on_other_machines(machine: MachineOf) -> None:
    machine(None, 0)
    assert message("cuda") == "--device_map 'cuda': there is no cuda:0 here (only the CPU); use auto for what is here"
    assert message("0").startswith("--device_map '0': there is no cuda:0 here (only the CPU)")
    plan = ", or give the capacity of each, such as 4x80GiB, to plan for devices that are not here"
    assert message("cuda:0", planning=True).endswith(f"there is no cuda:0 here (only the CPU); use auto for what is here{plan}")
    machine("xpu", 1)
    assert message("cuda:0=1GiB,1") == "--device_map 'cuda:0=1GiB,1': there is no cuda:0 here (xpu:0); use auto for what is here"
    assert message("cuda:0=1GiB,1", planning=True).endswith(f"there is no cuda:1 here (xpu:0); use auto for what is here{plan}")
    assert "did you mean 'xpu'?" in message("gpu")


def test_an_accelerator_of_a_type_of_its_own(machine: MachineOf) -> None:
    machine("mtia", 1)
    assert summary(parse_devices("mtia")) == [("mtia:0", 10, "mtia:0")]
    machine("privateuseone", 1)
    assert summary(parse_devices("auto")) == summary(parse_devices("privateuseone:0")) == [("privateuseone:0", 10, "privateuseone:0")]
    machine("cuda", 1)
    assert "unknown type of device 'privateuseone'" in message("privateuseone")


CAPACITIES = st.integers(min_value=1024, max_value=2**50)
NUMBERS = st.lists(st.integers(min_value=0, max_value=127), min_size=1, max_size=6, unique=True)


@given(numbers=NUMBERS, data=st.data(), kind=st.sampled_from(ACCELERATORS))
def test_a_planned_machine_reads_as_it_is_written(numbers: list[int], data: st.DataObject, kind: str) -> None:
    capacities = data.draw(st.lists(CAPACITIES, min_size=len(numbers), max_size=len(numbers)))
    expected = tuple(Device(f"{kind}:{n}", kind, size, None) for n, size in zip(numbers, capacities, strict=True))
    parts = [f"{device.name}={device.capacity}" for device in expected]
    short = ",".join([parts[0], *(part.removeprefix(f"{kind}:") for part in parts[1:])])
    spread = " , ".join(part.upper().replace(":", " : ").replace("=", " = ") for part in parts)
    for wish in (",".join(parts), short, spread, parts):
        assert parse_devices(wish, planning=True).devices == expected


@given(sizes=st.lists(CAPACITIES, min_size=1, max_size=6), data=st.data())
def test_a_simulated_machine_reads_as_it_is_written(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    made = parse_devices("sim:" + ",".join(f"{number}={sizes[number]}B" for number in order))
    assert made.devices == tuple(Device(f"sim:{n}", "sim", sizes[n], torch.device("cpu", n)) for n in order)
    assert parse_devices(f"sim:{len(sizes)}x{sizes[0]}") == parse_devices("sim:" + ",".join(f"{n}={sizes[0]}" for n in range(len(sizes))))


@given(rules=st.dictionaries(st.from_regex(r"[a-z_]{5,9}(\.[a-z_]{3,9}){0,2}", fullmatch=True), st.integers(0, 3), min_size=1, max_size=5))
def test_a_map_means_the_same_in_each_of_its_forms(rules: dict[str, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        set_up(patch, "cuda", 4)
        made = parse_devices(rules)
        assert {name: made.devices[index].name for name, index in made.layers.items()} == {name: f"cuda:{n}" for name, n in rules.items()}
        assert made.devices[0].name == f"cuda:{min(rules.values())}"
        assert parse_devices(json.dumps(rules)) == made
        assert parse_devices({name: f"cuda:{number}" for name, number in rules.items()}) == made
        assert parse_devices(",".join(f"{name}:{number}" for name, number in rules.items())) == made


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning", "ignore:Possible set:FutureWarning")  # Python's, about regexes
@given(
    text=st.text(alphabet=st.sampled_from('cudaxpsimlo:=,0123x4GMiB {}[]()\\".*|-'), max_size=24),
    planning=st.booleans(),
)
@example(text="\\", planning=False)
def test_any_text_is_a_machine_or_the_users_error(text: str, planning: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        set_up(patch, "cuda", 3)
        try:
            made = parse_devices(text, planning=planning)
        except UserError as error:
            assert "--device" in str(error)
        else:
            assert made.devices and all(device.capacity > 0 for device in made.devices)
            assert all(0 <= index < len(made.devices) for index in made.layers.values())


# ---- memory


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_free_memory_is_the_drivers_and_what_the_allocator_does_not_use(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    where = torch.device(kind, 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(mem_get_info=lambda of: (1000 + of.index, 9999)))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 200)
    assert free_bytes(where) == 1101


def test_free_memory_of_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (500, 9999), raising=False)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 0)
    assert free_bytes(torch.device("mtia", 0)) == 500


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("not supported\nat line 7"), "not supported"), (NotImplementedError(), "NotImplementedError")]
)
def test_a_driver_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, machine: MachineOf, error: Exception, reason: str) -> None:
    def refuse(device: torch.device) -> int:
        raise error

    machine("mtia", 1)
    monkeypatch.setattr(devices, "free_bytes", free_bytes)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse, raising=False)
    advice = f"mtia:0 does not tell its free memory ({reason}); say how much may be used, as in mtia:0=16GiB"
    with pytest.raises(UserError) as caught:
        free_bytes(torch.device("mtia", 0))
    assert str(caught.value) == advice
    assert message("auto") == f"--device_map 'auto': {advice}"
    assert summary(parse_devices("mtia:0=16GiB")) == [("mtia:0", 16, "mtia:0")]


def host(root: Path, meminfo: str | None, groups: str | None, files: dict[str, str]) -> Path:
    """A made-up file system."""
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": groups, **files}.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return root


MEMINFO = "MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable:    1000 kB\n"
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (None, {}, 1024000),
        ("0::/\n", {}, 1024000),
        ("0::/a/b\n", {f"{V2}/a/b/memory.max": "max\n", f"{V2}/a/b/memory.current": "5\n"}, 1024000),
        ("0::/a/b\n", {f"{V2}/a/b/memory.max": "7000\n", f"{V2}/a/b/memory.current": "5000\n"}, 2000),
        ("0::/a/b\n", {f"{V2}/a/memory.max": "7000\n", f"{V2}/a/memory.current": "5000\n"}, 2000),
        (
            "0::/a\n",
            {f"{V2}/a/memory.max": "7000", f"{V2}/a/memory.current": "5000", f"{V2}/a/memory.stat": "anon 1\ninactive_file 1500\n"},
            3500,
        ),
        ("0::/../x\n", {f"{V2}/memory.max": "7000", f"{V2}/memory.current": "5000"}, 2000),
        ("0::/\n", {f"{V2}/memory.max": "7000", f"{V2}/memory.current": "8000"}, 0),
        ("0::/\n", {f"{V2}/memory.max": "9999999999", f"{V2}/memory.current": "8000"}, 1024000),
        (
            "5:devices:/d\n4:memory:/docker/abc\n0::/\n",
            {
                f"{V1}/memory.limit_in_bytes": "6000",
                f"{V1}/memory.usage_in_bytes": "4000",
                f"{V1}/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
            2500,
        ),
        (
            "4:cpu,memory:/job\n",
            {
                f"{V1}/memory.limit_in_bytes": "9223372036854771712",
                f"{V1}/memory.usage_in_bytes": "4000",
                f"{V1}/job/memory.limit_in_bytes": "6000",
                f"{V1}/job/memory.usage_in_bytes": "1000",
            },
            5000,
        ),
        ("4:memory:/job\n", {"sys/fs/cgroup/job/memory.max": "7000", "sys/fs/cgroup/job/memory.current": "1"}, 1024000),
    ],
)
def test_host_memory_is_what_is_available_within_the_control_groups(
    tmp_path: Path, groups: str | None, files: dict[str, str], expected: int
) -> None:
    assert available_host_bytes(host(tmp_path, MEMINFO, groups, files)) == expected


def test_host_memory_where_proc_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available_host_bytes(tmp_path) == 4096000
    assert available_host_bytes(host(tmp_path, "MemTotal: 1 kB\n", "0::/\n", {})) == 4096000


def test_host_memory_of_this_machine() -> None:
    assert 0 <= free_bytes(CPU) < 2**50


@pytest.mark.parametrize(
    ("kind", "peak", "expected"),
    [
        ("sim", 10**9, 0),
        ("cuda", 0, 512 * 2**20),
        ("cuda", 100 * GIB, 512 * 2**20 + 4 * GIB),
        ("xpu", 100 * GIB, 5 * GIB),
        ("cpu", 1, 256 * 2**20 + 1),
        ("hpu", 100 * GIB, 5 * GIB),
    ],
)
def test_margins(kind: str, peak: int, expected: int) -> None:
    assert margin(kind, peak) == expected


@given(kind=st.sampled_from(sorted(MARGINS)), peak=st.integers(0, 2**50), more=st.integers(0, 2**40))
def test_a_larger_peak_has_no_smaller_margin(kind: str, peak: int, more: int) -> None:
    assert 0 <= margin(kind, peak) <= margin(kind, peak + more)


def test_attention_keeps_scores_unless_a_fused_kernel_is_known() -> None:
    assert {kind: attention(kind) for kind in ("cuda", "cpu", "sim", "xpu", "hpu")} == {
        "cuda": "fused",
        "cpu": "fused",
        "sim": "fused",
        "xpu": "math",
        "hpu": "math",
    }


# ---- precision


@pytest.mark.parametrize(
    ("native", "wish", "source", "device", "expected"),
    [
        (True, None, torch.bfloat16, CPU, torch.bfloat16),
        (False, None, torch.bfloat16, CPU, torch.float32),
        (False, None, torch.bfloat16, CUDA, torch.bfloat16),
        (True, None, torch.float16, CPU, torch.float32),
        (True, None, torch.float16, CUDA, torch.float16),
        (True, None, torch.float32, CPU, torch.float32),
        (True, None, torch.float32, CUDA, torch.float32),
        (False, torch.bfloat16, torch.float32, CPU, torch.bfloat16),
        (True, torch.float32, torch.bfloat16, CUDA, torch.float32),
    ],
)
def test_the_compute_dtype(
    monkeypatch: pytest.MonkeyPatch,
    native: bool,
    wish: torch.dtype | None,
    source: torch.dtype,
    device: torch.device,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(devices, "native_bfloat16", lambda where: native or where.type != "cpu")
    assert pick_compute_dtype(wish, source, device) == expected


def test_bfloat16_is_native_where_the_cpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_bfloat16(CUDA)
    for avx, amx in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda value=avx: value)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda value=amx: value)
        assert native_bfloat16(CPU) is (avx or amx)


def test_peak_memory_counts_what_was_held() -> None:
    before = peak_bytes(CPU)
    held = torch.ones(2**24)
    assert 2**26 < peak_bytes(CPU) >= before and len(held) == 2**24
    assert peak_bytes(CPU) < 2**40


@pytest.mark.parametrize(
    ("platform", "status", "expected"),
    [
        ("linux", "VmPeak:\t  900 kB\nVmHWM:\t  700 kB\nVmRSS:\t 600 kB\n", 700 * 1024),
        ("linux", "VmSize:\t  900 kB\n", 5000 * 1024),  # some sandboxes tell no more
        ("linux", None, 5000 * 1024),
        ("freebsd14", None, 5000 * 1024),
        ("darwin", None, 5000),
    ],
)
def test_peak_memory_is_in_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, status: str | None, expected: int) -> None:
    class Usage:
        ru_maxrss = 5000

    file = tmp_path / "status"
    if status is not None:
        file.write_text(status)
    monkeypatch.setattr(devices.sys, "platform", platform)
    monkeypatch.setattr(devices.resource, "getrusage", lambda who: Usage)
    monkeypatch.setattr(devices, "Path", lambda name: file)
    assert peak_bytes(CPU) == expected


def test_memory_is_released_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    release_host_memory()

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(devices.ctypes, "CDLL", missing)
    release_host_memory()


def test_peak_memory_of_an_accelerator_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 77)
    assert peak_bytes(CUDA) == 77
