"""Choice of device and precision, with accelerators that are made up."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evenround.errors import UserError
from evenround.memory import devices
from evenround.memory.devices import native_bfloat16, peak_bytes, pick_compute_dtype, pick_device, release_host_memory, simulated_capacity

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
Machine = Callable[[str | None, int], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine("xpu", 2)`: one with two XPUs; `machine(None, 0)`: only the CPU."""

    def set_up(kind: str | None, count: int) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None if kind is None else torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return set_up


@pytest.mark.parametrize(
    ("text", "device"),
    [("auto", "xpu:0"), ("cpu", "cpu"), ("CPU", "cpu"), ("xpu", "xpu:0"), (" xpu:1 ", "xpu:1"), ("0", "xpu:0"), ("1", "xpu:1")],
)
def test_a_device_that_is_here(machine: Machine, text: str, device: str) -> None:
    machine("xpu", 2)
    assert pick_device(text) == torch.device(device)


def test_auto_without_an_accelerator_is_the_cpu(machine: Machine) -> None:
    machine(None, 0)
    assert pick_device("auto") == pick_device("cpu") == CPU


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (None, "cuda", "--device 'cuda': there is no such accelerator here (only the CPU); use --device cpu"),
        (None, "0", "--device '0': there is no such accelerator here (only the CPU); use --device cpu"),
        ("xpu", "cuda:0", "--device 'cuda:0': there is no such accelerator here (xpu); use --device cpu"),
        ("xpu", "xpu:2", "--device 'xpu:2': devices 0 to 1 are here"),
        ("xpu", "7", "--device '7': devices 0 to 1 are here"),
        ("xpu", "", "--device '' is not understood; use auto, cpu, an accelerator such as cuda:0, or its number"),
        ("xpu", "xpu:", "--device 'xpu:' is not understood; use auto, cpu, an accelerator such as cuda:0, or its number"),
        ("xpu", "-1", "--device '-1' is not understood; use auto, cpu, an accelerator such as cuda:0, or its number"),
        *(
            (
                "xpu",
                text,
                f"--device {text!r}: more than one device and maps are not implemented yet; give one, such as cuda:0",
            )
            for text in ("0,1", "mlp=cuda:1", "4x80GiB")
        ),
    ],
)
def test_a_device_that_is_not(machine: Machine, kind: str | None, text: str, message: str) -> None:
    machine(kind, 2 if kind else 0)
    with pytest.raises(UserError) as caught:
        pick_device(text)
    assert str(caught.value) == message


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


def test_a_simulated_device_is_given_by_its_size() -> None:
    assert simulated_capacity("sim:256MiB") == simulated_capacity(" SIM:1x256MiB ") == 2**28
    assert simulated_capacity("cuda:0") is simulated_capacity("cpu") is None


@pytest.mark.parametrize("text", ["sim:2x1GiB", "sim:0=1GiB,1=2GiB", "sim:1GiB,1GiB"])
def test_several_simulated_devices_are_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        simulated_capacity(text)
    assert str(caught.value) == f"--device {text!r}: several simulated devices are not implemented yet; give one, such as sim:256MiB"


def test_a_simulated_device_of_no_size() -> None:
    with pytest.raises(UserError, match=r"size 'big' \(--device\) cannot be read"):
        simulated_capacity("sim:big")


def test_only_quantize_runs_on_simulated_devices() -> None:
    with pytest.raises(UserError, match="--device 'sim:1GiB': only `quantize` can run on a simulated device yet"):
        pick_device("sim:1GiB")
