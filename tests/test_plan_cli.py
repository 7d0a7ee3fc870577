"""`evenround plan`: exit codes, JSON, flags that count, and that it says what `quantize` does."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import evenround
from conftest import ARCHITECTURES, save_model
from evenround import UserError
from evenround.cli import main
from evenround.config import DeviceConfig
from evenround.memory.devices import Device, Machine, margin
from evenround.outlook import bounds_for
from evenround.plan import NothingFits, Plan
from small_jobs import Small

LIGHT = ["--iters", "2", "--nsamples", "6", "--seqlen", "16", "--batch_size", "4", "--scheme", "W4A16G32", "--compute_dtype", "float32"]
TOKENS = torch.randint(3, 128, (6, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_model(ARCHITECTURES["llama"], folder, torch.bfloat16)
    return folder


def planned(capsys: pytest.CaptureFixture[str], source: Path, *arguments: object, code: int = 0) -> dict[str, object]:
    """What `plan --json` prints."""
    assert main(["plan", str(source), *LIGHT, "--json", *(str(argument) for argument in arguments)]) == code
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def told(capsys: pytest.CaptureFixture[str], source: Path, *arguments: object, command: str = "plan") -> str:
    """What stderr says to wrong arguments; exit code 2, nothing on stdout."""
    assert main([command, str(source), *LIGHT, *(str(argument) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return " ".join(captured.err.split())


def peaks(plan: dict[str, object]) -> list[int]:
    return [device["peak_bytes"] for device in plan["devices"]]  # type: ignore[attr-defined]


def test_the_json_has_what_was_promised(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, source, "--device", "cuda:0=70GiB,cuda:1=24GiB")
    assert plan["fits"] is True and plan["strategy"] in ("single", "share", "split") and plan["micro_batch"] in (4, 2)
    assert {"host_bytes", "disk_bytes", "tried", "samples_at_once", "recompute", "chained_inputs", "least_bytes"} <= set(plan)
    assert plan["least_bytes"] == [] and isinstance(plan["host_bytes"], int) and isinstance(plan["disk_bytes"], int)
    devices = plan["devices"]
    assert [device["name"] for device in devices] == ["cuda:0", "cuda:1"]  # type: ignore[attr-defined]
    assert [device["capacity_bytes"] for device in devices] == [70 * 2**30, 24 * 2**30]  # type: ignore[attr-defined]
    for device in devices:  # type: ignore[attr-defined]
        assert sum(device["breakdown"].values()) == device["peak_bytes"]
        assert set(device["breakdown"]) <= {
            "weights", "tuning state", "saved activations", "gradients", "chained inputs", "transfers", "other",
        }  # fmt: skip
    used = devices[0]  # type: ignore[index]
    assert used["peak_bytes"] > 0 and used["margin_bytes"] == margin("cuda", used["peak_bytes"])
    last = plan["tried"][-1]  # type: ignore[index]
    assert set(last) == {"wish", "peaks_bytes", "fits", "reason"} and last["fits"] is True and last["reason"] == ""


def test_nothing_fits_exits_with_1_and_tells_the_least(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, source, "--device", "sim:2x40KiB", code=1)
    assert plan["fits"] is False and len(plan["least_bytes"]) == 2  # type: ignore[arg-type]
    assert all(not attempt["fits"] and attempt["reason"] for attempt in plan["tried"])  # type: ignore[attr-defined]
    first, second = plan["least_bytes"]  # type: ignore[misc]
    assert planned(capsys, source, "--device", f"sim:0={first},sim:1={second}")["fits"] is True
    assert planned(capsys, source, "--device", f"sim:0={int(first * 0.98)},sim:1={int(second * 0.98)}", code=1)["fits"] is False
    assert main(["plan", str(source), *LIGHT, "--device", "sim:2x40KiB"]) == 1
    assert "nothing fits: model.layers.0 needs more than sim:0 40.0 KiB, sim:1 40.0 KiB" in " ".join(capsys.readouterr().out.split())


def test_quantize_refuses_what_does_not_fit_before_it_reads_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: object, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr("evenround.model.Skeleton.read", refuse)
    arguments = ["--dataset", "demo", "--output_dir", str(tmp_path / "made"), "--device", "sim:40KiB"]
    assert main(["quantize", str(tiny), *LIGHT, *arguments]) == 1
    captured = capsys.readouterr()
    assert "nothing fits: model.layers.0 needs more than sim:0 40.0 KiB; the least that would do: sim:0 " in " ".join(captured.err.split())
    assert captured.out == "" and not list(tmp_path.glob("made/**/*.safetensors*"))
    with pytest.raises(NothingFits):
        evenround.quantize(tiny, tmp_path / "made", iters=2, dataset=TOKENS, nsamples=6, seqlen=16, device_map="sim:40KiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--placement", "splt"], "share, split, pipeline, greedy, nor a JSON map; did you mean 'split'?"),
        (["--placement", "{broken"], "--placement '{broken' is no JSON object: "),
        (["--placement", '{"mlp": 2}'], """--placement: 'mlp' goes to 2; give the number of a device of --device, 0 to 1, or "cpu\""""),
        (["--placement", '{"mlp": -1}'], "--placement: 'mlp' goes to -1;"),
        (["--placement", '{"mlp": true}'], "--placement: 'mlp' goes to True;"),
        (["--placement", '{"mlp": "cuda:0"}'], "--placement: 'mlp' goes to 'cuda:0';"),
        (["--placement", '{"mlp.down_prj": 1}'], "'mlp.down_prj', which is no module of a block; did you mean 'mlp.down_proj'"),
        (["--placement", '{"xyzzy": 1}'], "the device map names 'xyzzy', which is no module of a block"),
        (["--placement", '{"mlp(": 1}'], "the device map names 'mlp(', which is neither a module nor a regular expression"),
        (["--output_device", "cuda:0"], "--output_device 'cuda:0': only cpu can be given; where else layers go is for --placement"),
        (["--output_device", "cpu", "--placement", "split"], "--output_device cpu places modules, and so does a map"),
        (["--output_device", "cpu", "--placement", '{"mlp": 1}'], "--output_device cpu places modules, and so does a map or --placement"),
        (["--device", "4x80"], "the capacity 80 has no unit; write 80GiB"),
        (["--device", "cuda:0"], "there is no cuda:0 here (only the CPU); use auto for what is here, or give the capacity of each"),
        (["--device", "sim:2x1GiB,cuda:0=1GiB"], "--device"),
        (["--nblocks", "0"], "--nblocks 0 must be a whole number of at least 1"),
        (["--iters", "2", "--disable_opt_rtn"], "--disable_opt_rtn is for --iters 0 and would change nothing with 2; leave it out"),
        (["--txt", "x"], "there is no flag --txt"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_input_exits_with_2_and_says_what_to_do(
    arguments: list[str], message: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if "--device" in arguments else ["--device", "sim:2x1GiB", *arguments]
    assert message in told(capsys, source, *given)


def test_two_maps_are_refused() -> None:
    """With what only real devices can have: a map in --device."""
    machine = Machine(tuple(Device(f"cuda:{at}", "cuda", 2**30, None) for at in range(2)), {"mlp": 1})
    jobs = Small().jobs()
    for config, message in [
        (DeviceConfig(placement="split"), "--placement split and a map in --device contradict each other; give one"),
        (DeviceConfig(placement='{"mlp": 1}'), "--placement and --device both hold a map; give one"),
        (DeviceConfig(output_device="cpu"), "--output_device cpu places modules, and so does a map or --placement; give one"),
    ]:
        with pytest.raises(UserError) as caught:
            bounds_for(jobs, machine, config)
        assert message in str(caught.value)
    (bounds, *_) = bounds_for(jobs, machine, DeviceConfig())
    assert bounds.strategy == "map" and bounds.placed == {"model.layers.0.mlp": 1}


def test_compiled_code_and_simulated_devices_are_refused_by_quantize(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--output_dir", tmp_path, "--device", "sim:1GiB", "--enable_torch_compile"]
    assert "--enable_torch_compile: simulated devices see single operations" in told(capsys, source, *arguments, command="quantize")


def test_a_config_alone_gives_the_plan_of_the_model(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(source / "config.json", tmp_path)
    whole = planned(capsys, source, "--device", "2x24GiB", "--placement", "split")
    for name in (tmp_path, tmp_path / "config.json", source / "config.json"):
        assert planned(capsys, name, "--device", "2x24GiB", "--placement", "split") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"placement": "split"},
        {"placement": "share", "low_gpu_mem_usage": True},
        {"placement": '{"mlp": 1}'},
        {"output_device": "cpu"},
        {"nblocks": 2, "placement": "pipeline"},
    ],
    ids=str,
)
def test_the_plan_is_what_quantize_records_and_does(flags: dict[str, object], source: Path, tmp_path: Path) -> None:
    arguments: dict[str, object] = {
        "scheme": "W4A16G32", "iters": 2, "nsamples": 6, "seqlen": 16, "batch_size": 4, "compute_dtype": "float32",
        "device_map": "sim:2x1GiB", **flags,
    }  # fmt: skip
    plan = evenround.plan(source, **arguments)  # type: ignore[arg-type]
    assert isinstance(plan, Plan) and plan.fits
    record = evenround.quantize(source, tmp_path, dataset=TOKENS, **arguments)  # type: ignore[arg-type]
    ours, recorded = plan.to_dict(), dict(record["plan"])  # type: ignore[call-overload]
    assert ours == recorded
    for block in record["blocks"]:  # type: ignore[attr-defined]
        assert block["planned_bytes"] == block["peak_bytes"] == list(plan.usage(block["blocks"]).peaks)


def test_every_flag_of_the_machine_changes_the_plan(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = ["--device", "sim:2x1GiB"]
    plans = {
        name: planned(capsys, source, *two, *flags)
        for name, flags in {
            "single": ["--placement", "single"],
            "share": ["--placement", "share"],
            "split": ["--placement", "split"],
            "greedy": ["--placement", "greedy"],
            "pipeline": ["--placement", "pipeline"],
            "map": ["--placement", '{"self_attn": 1}'],
            "low": ["--placement", "single", "--low_gpu_mem_usage"],
            "output": ["--output_device", "cpu"],
        }.items()
    }
    for name in ("single", "share", "split", "greedy", "pipeline", "map"):
        assert plans[name]["strategy"] == name
    assert len({tuple(peaks(plan)) for plan in plans.values()}) == len(plans)
    assert plans["low"]["chained_inputs"] == "host" and plans["single"]["chained_inputs"] == "device"
    assert plans["low"]["host_bytes"] > plans["single"]["host_bytes"]  # type: ignore[operator]
    chains = 3 * 6 * 16 * 64 * 4
    assert peaks(plans["single"])[0] - peaks(plans["low"])[0] == chains
    places = plans["output"]["groups"][0]["places"][0]  # type: ignore[index]
    assert places[""] == -1 and set(places.values()) == {-1, 0, 1}
    assert all(name.rpartition(".")[2].endswith("_proj") for name, place in places.items() if place >= 0)


@pytest.mark.parametrize(
    ("wish", "names"),
    [
        ("4x80GiB", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("xpu:2x24GiB", ["xpu:0", "xpu:1"]),
        ("cuda:0=70GiB,cuda:2=24GiB", ["cuda:0", "cuda:2"]),
        ("2=24GiB,6=24GiB", ["cuda:2", "cuda:6"]),
        ("sim:0=1GiB,1=2GiB", ["sim:0", "sim:1"]),
        ("sim:512MiB", ["sim:0"]),
        ("cpu=8GiB", ["cpu"]),
    ],
)
def test_forms_of_devices(wish: str, names: list[str], source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--device", "--device_map", "--devices", "--device-ids"):
        plan = planned(capsys, source, flag, wish)
        assert [device["name"] for device in plan["devices"]] == names  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "flags",
    [["--batch_size", "2"], ["--seqlen", "8"], ["--nsamples", "3"], ["--nblocks", "2"], ["--momentum", "0"], ["--group_size", "16"],
     ["--keep", "best"], ["--compute_dtype", "bfloat16"], ["--ignore_layers", "mlp"], ["--quant_lm_head"], ["--format", "fake"],
     ["--gradient_accumulate_steps", "2"], ["--iters", "0", "--disable_opt_rtn"]],
    ids="_".join,
)  # fmt: skip
def test_flags_of_the_job_count(flags: list[str], source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = ["--device", "sim:1GiB"]
    if flags in (["--keep", "best"], ["--group_size", "16"], ["--gradient_accumulate_steps", "2"]):
        device = ["--device", "sim:2x1GiB", "--placement", "share"]
    plan, other = planned(capsys, source, *device), planned(capsys, source, *device, *flags)
    if flags == ["--keep", "best"]:
        assert other == plan  # the iterate that is kept is on the host
    elif flags == ["--gradient_accumulate_steps", "2"]:
        assert other["micro_batch"] == 3  # 6 samples a step over 2 devices, where it was 4
    elif flags == ["--group_size", "16"]:
        assert peaks(other) != peaks(plan)  # more groups, more clips
    else:
        assert other != plan


def test_a_device_that_is_not_used_need_not_have_room_for_what_a_used_one_wants(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody else fills the second card; the first has room for all."""
    assert planned(capsys, source, "--device", "cuda:0=24GiB,cuda:1=256MiB", "--placement", "single")["fits"] is True
