"""The command line: what a person types, what they are told when it is wrong, and what scripts get."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from evenround import cli
from evenround.api import request
from evenround.checkpoint import Checkpoint
from evenround.cli import NOT_YET, build_parser, main
from evenround.job import Job, formats_and_schemes
from evenround.model import skeleton_from
from evenround.scheme import PRESETS

LIGHT = ["--iters", "2", "--nsamples", "4", "--seqlen", "16", "--batch_size", "2", "--dataset", "demo", "--scheme", "W4A16G32"]


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What stderr says to wrong arguments; the exit code must be 2 and stdout empty."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return " ".join(captured.err.split())


def test_quantize_eval_verify_show(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    assert main(["quantize", str(tiny), *LIGHT, "--format", "llm_compressor", "--output-dir", str(made), "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["formats"]["llm_compressor"]["bits_per_weight"] < 4.6 and summary["quantized_weights"] == 3145728
    assert "model.layers.*.mlp.down_proj" in captured.err and "(4/4)" in captured.err

    text = tmp_path / "text.txt"
    text.write_text("And it came to pass in those days, that there went out a decree. " * 30)
    assert main(["eval", str(made), "--reference", str(tiny), "--text", str(text), "--seqlen", "64", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {"perplexity", "reference_perplexity", "kl", "top1", "tokens"} <= set(values) and 0 < values["kl"] < 0.1
    assert main(["eval", str(made), "--text", str(text)]) == 0
    assert "perplexity" in capsys.readouterr().out

    assert main(["verify", str(made), "--reference", str(tiny), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["show", str(made), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["show", str(made)]) == 0
    assert "model.layers.3" in capsys.readouterr().out

    shard = made / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    assert main(["verify", str(made)]) == 1
    assert "model.safetensors" in capsys.readouterr().out


def test_python_dash_m(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "evenround", "quantize", str(tmp_path / "nowhere")], capture_output=True, text=True)
    assert done.returncode == 2 and "is not a directory" in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_unknown_flags_get_the_nearest(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no flag --nsample_s; did you mean '--nsamples'?" in told(capsys, "quantize", tiny, "--nsample-s", "3")
    assert "there is no flag --txt; did you mean '--text'?" in told(capsys, "eval", tiny, "--text", "x", "--txt=y")
    assert "unexpected argument 'more'" in told(capsys, "quantize", tiny, "more")


@pytest.mark.parametrize("flag", NOT_YET)
def test_flags_of_auto_round_that_are_not_here_yet_are_refused_by_name(flag: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--{flag} is not implemented yet" in told(capsys, "quantize", tiny, f"--{flag.replace('_', '-')}", "1")


def test_no_flag_is_both_known_and_refused() -> None:
    known = {flag.lstrip("-") for flags in flags_of_quantize().values() for flag in flags}
    assert not known & set(NOT_YET)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "W4A61"], "no scheme 'W4A61' (--scheme); did you mean 'W4A16'?"),
        (["--scheme", "MXFP6"], "scheme 'MXFP6' (--scheme) is not implemented yet"),
        (["--scheme", "BF16"], "scheme 'BF16' (--scheme) quantizes nothing"),
        (["--data_type", "mx_pf"], "data type 'mx_pf' (--data_type) is not known; did you mean 'mx_fp'?"),
        (["--data_type", "mx_fp8", "--bits", "4"], "bits 4 (--bits) is not what data type 'mx_fp8' (--data_type) has"),
        (["--group_size", "128,128"], "group_size (128, 128) (--group_size): only data type 'fp' has tiles"),
        (["--group_size", "1,2,3"], "group_size (1, 2, 3) (--group_size)"),
        (["--group_size", "many"], "argument --group_size: 'many' must be a whole number, or two with a comma between "),
        (["--act_bits", "9"], "act_bits 9 (--act_bits) must be a whole number from 2 to 8"),
        (["--act_bits", "4", "--act_data_type", "fp"], "act_bits 4 (--act_bits) must be 8 for data type 'fp'"),
        (["--act_group_size", "32"], "act_group_size 32 (--act_group_size) would change nothing"),
        (["--act_asym"], "act_sym False (--act_asym) would change nothing"),
        (["--act_data_type", "fp"], "act_data_type fp (--act_data_type) would change nothing"),
        (["--disable_act_dynamic"], "act_dynamic False (--disable_act_dynamic) would change nothing"),
        (["--act_bits", "8", "--act_data_type", "fp", "--act_asym"], "activation data type 'fp' has no zero points; leave --act_asym out"),
        (["--scheme", "INT8", "--disable_act_dynamic"], "one symmetric scale: --act_group_size 0, no --act_asym"),
        (["--scheme", "MXFP4", "--asym"], "data type 'mx_fp' has no zero points; leave --asym out"),
        (["--avg_bits", "3"], "--avg_bits and --options go together"),
        (["--options", "W2A16,W4A16"], "--avg_bits and --options go together"),
        (["--avg_bits", "3", "--options", "W2A16,W4A16"], "--scheme W4A16G32 is for one scheme"),
        (["--bits", "9"], "bits 9 (--bits) must be a whole number from 2 to 8"),
        (["--bits", "four"], "argument --bits/--bit: invalid int value: 'four'"),
        (["--group_size", "100"], "group_size 100 (--group_size) does not divide the width 256 of model.layers.0.self_attn.q_proj"),
        (["--iters", "-1"], "--iters -1 must be a whole number of at least 0"),
        (["--disable_opt_rtn"], "--disable_opt_rtn is for --iters 0 and would change nothing with 2; leave it out"),
        (["--enable_opt_rtn"], "--enable_opt_rtn is for --iters 0 and would change nothing with 2; leave it out"),
        (["--iters", "0", "--enable_opt_rtn", "--disable_opt_rtn"], "--enable_opt_rtn and --disable_opt_rtn contradict each other"),
        (["--iters", "0", "--enable_alg_ext"], "--enable_alg_ext is for tuning and would change nothing with --iters 0; leave it out"),
        (["--lr", "0"], "--lr 0.0 must be a positive number"),
        (["--momentum", "1"], "--momentum 1.0 must be"),
        (["--nblocks", "0"], "--nblocks 0 must be"),
        (["--format", "auto_rnd"], "no format 'auto_rnd' (--format); did you mean 'auto_round'?"),
        (["--format", "gguf:q4_k_m"], "not implemented yet"),
        (["--format", "fake,fake"], "names a format twice"),
        (["--format", ","], "--format is empty"),
        (["--max_shard_size", "big"], "size 'big' (--max_shard_size) cannot be read"),
        (["--device", "4x80GiB"], "there is no cuda:0 here (only the CPU); use auto for what is here"),
        (["--device", "cuda:zero"], "is not understood"),
        (["--compute_dtype", "float8"], "invalid choice: 'float8'"),
        (["--disable_amp", "--compute_dtype", "bfloat16"], "give one"),
        (["--trust_remote_code", "--disable_trust_remote_code"], "contradict each other"),
        (["--ignore_layers", "no_such_layer"], "'no_such_layer' (--ignore_layers) matches no layer"),
        (["--layer_config", "{broken"], "(--layer_config) cannot be read"),
        (["--layer_config", '{"lm_head": "W8A16"}'], "left alone unless --quant_lm_head"),
        (["--dataset", "no/such.txt"], "no/such.txt"),
        (["--recipe", "bst"], "no recipe 'bst' (--recipe); did you mean 'best'?"),
        (["--not_use_best_mse", "--keep", "best"], "give one"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_values_say_what_to_do(
    arguments: list[str], message: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in told(capsys, "quantize", tiny, *LIGHT, "--output_dir", tmp_path / "made", *arguments)
    assert not list((tmp_path / "made").rglob("*.safetensors*")) if (tmp_path / "made").exists() else True


def job_of(*arguments: str) -> Job:
    return cli._request(build_parser().parse(["quantize", "model", *arguments]), None)[0]


MIX = ["--avg_bits", "3", "--options", "W2A16,W4A16"]
CHANGES: dict[str, tuple[list[str], list[str]]] = {
    "recipe": ([], ["light"]),
    "scheme": ([], ["NVFP4"]),
    "bits": ([], ["3"]),
    "group_size": (["--data_type", "fp"], ["128,128"]),
    "asym": ([], []),
    "data_type": ([], ["mx_fp"]),
    "act_bits": ([], ["8"]),
    "act_group_size": (["--act_bits", "8"], ["0"]),
    "act_asym": (["--act_bits", "8"], []),
    "act_data_type": (["--act_bits", "8"], ["mx_fp"]),
    "disable_act_dynamic": (["--act_bits", "8", "--act_group_size", "0"], []),
    "avg_bits": (MIX, ["3.5"]),
    "options": (MIX, ["W2A16,W8A16"]),
    "layer_config": ([], ['{"q_proj": "W8A16"}']),
    "ignore_layers": ([], ["q_proj"]),
    "quant_lm_head": ([], []),
    "iters": ([], ["3"]),
    "batch_size": ([], ["3"]),
    "gradient_accumulate_steps": ([], ["3"]),
    "lr": ([], ["0.5"]),
    "minmax_lr": ([], ["0.5"]),
    "momentum": ([], ["0.5"]),
    "disable_minmax_tuning": ([], []),
    "keep": ([], ["best"]),
    "not_use_best_mse": (["--recipe", "auto-round"], []),
    "disable_quanted_input": ([], []),
    "nblocks": ([], ["3"]),
    "disable_opt_rtn": (["--iters", "0"], []),
    "enable_opt_rtn": (["--recipe", "rtn"], []),
    "enable_alg_ext": (["--recipe", "auto-round"], []),
    "seed": ([], ["3"]),
    "dataset": ([], ["demo"]),
    "nsamples": ([], ["3"]),
    "seqlen": ([], ["3"]),
    "format": ([], ["fake"]),
    "output_dir": ([], ["elsewhere"]),
    "max_shard_size": ([], ["3GB"]),
    "overwrite": ([], []),
    "device": ([], ["cpu"]),
    "placement": ([], ["split"]),
    "low_gpu_mem_usage": ([], []),
    "output_device": ([], ["cpu"]),
    "enable_torch_compile": ([], []),
    "compute_dtype": ([], ["float16"]),
    "disable_amp": ([], []),
    "trust_remote_code": ([], []),
}
"""Of each flag: flags that it needs, and its value."""

NOT_OF_THE_JOB = {
    "help", "model", "model_flag", "json", "tasks", "eval_bs", "limit", "num_fewshot",
    "disable_trust_remote_code",  # says what is so anyway
}  # fmt: skip


def flags_of_quantize() -> dict[str, list[str]]:
    """`{where argparse puts it: its names}`."""
    actions = build_parser()._subparsers._group_actions[0].choices["quantize"]._actions  # type: ignore[union-attr, index, call-overload]
    return {action.dest: action.option_strings for action in actions}


def test_every_flag_is_in_one_of_the_tables() -> None:
    assert set(flags_of_quantize()) == set(CHANGES) | NOT_OF_THE_JOB


@pytest.mark.parametrize(
    ("dest", "flag"), [(dest, flag) for dest, flags in flags_of_quantize().items() if dest in CHANGES for flag in flags]
)
def test_every_flag_changes_the_job(dest: str, flag: str) -> None:
    needed, value = CHANGES[dest]
    asked = job_of(*needed, flag, *value)
    assert asked != job_of(*needed)
    assert asked == job_of(*needed, flag.replace("_", "-"), *value)


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        (["--scheme", "W4A16", "--data_type", "fp", "--group_size", "128,128"], {"data_type": "fp", "group_size": (128, 128)}),
        (["--asym", "--group_size", "-1"], {"sym": False, "group_size": -1}),
        (["--act_bits", "8", "--act_asym", "--act_group_size", "64"], {"act_bits": 8, "act_sym": False, "act_group_size": 64}),
        (["--act_bits", "8", "--act_dtype", "fp8", "--disable_act_dynamic"], {"act_bits": 8, "act_data_type": "fp", "act_dynamic": False}),
        (["--iters", "0", "--disable_opt_rtn"], {"recipe": "opt-rtn", "opt_rtn": False}),
        (["--recipe", "rtn", "--enable_opt_rtn"], {"iters": 0, "opt_rtn": True}),
        (["--recipe", "auto-round", "--enable_alg_ext"], {"recipe": "auto-round", "enable_alg_ext": True}),
        (["--target_bits", "3.5", "--schemes", "W2A16,W4A16,BF16"], {"avg_bits": 3.5, "options": ["W2A16", "W4A16", "BF16"]}),
        (["--layer_config", "{q_proj:{data_type:mx_fp8}}"], {"layer_config": {"q_proj": {"data_type": "mx_fp8"}}}),
    ],
)  # fmt: skip
def test_flags_ask_for_what_arguments_ask_for(arguments: list[str], keywords: dict[str, object]) -> None:
    asked, wanted = job_of(*arguments), request("model", **keywords)[0]  # type: ignore[arg-type]
    assert (asked.rules, asked.tune, asked.mix) == (wanted.rules, wanted.tune, wanted.mix)


COMMANDS = re.findall(r"^\$ evenround quantize MODEL (.*)", (Path(__file__).parent.parent / "docs" / "schemes.md").read_text("utf-8"), re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_on_schemes_are_taken(command: str, tiny: Path) -> None:
    _, schemes = formats_and_schemes(job_of(*shlex.split(command)), skeleton_from(tiny, Checkpoint.open(tiny), False))
    assert any(schemes.values())


def test_what_the_page_on_schemes_says_of_fields() -> None:
    assert len(COMMANDS) == 5
    assert job_of("--data_type", "mx_fp8").rules.default == PRESETS["MXFP8A16"]
    tiles = ("--data_type", "fp", "--group_size", "128,128", "--act_bits", "8", "--act_group_size", "128")
    assert job_of(*tiles).rules.default == PRESETS["FP8_BLOCK"]
    static = ("--scheme", "FP8_DYNAMIC", "--disable_act_dynamic", "--act_group_size", "0")
    assert job_of(*static).rules.default == PRESETS["FP8_STATIC"]
    assert job_of("--scheme", "MXFP4", "--bits", "8").rules.default.label == "MXFP8 A4 mx_fp"


def test_a_scheme_of_fields_is_the_preset_on_disk(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounding = ["--recipe", "rtn", "--format", "llm_compressor", "--json"]
    for name, scheme in (("preset", ["--scheme", "MXFP8"]), ("fields", ["--data_type", "mx_fp8", "--act_bits", "8"])):
        assert main(["quantize", str(tiny), *rounding, *scheme, "--output_dir", str(tmp_path / name)]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["formats"]["llm_compressor"]["bits_per_weight"] == pytest.approx(8.25)
        assert "MXFP8 A8 mx_fp" in captured.err
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("preset", "fields"))
    assert one == other


def test_two_models_or_none(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no model given" in told(capsys, "quantize")
    assert "two models given" in told(capsys, "quantize", tiny, "--model", "other")


def test_dashes_and_underscores_are_alike(tiny: Path, tmp_path: Path) -> None:
    arguments = [argument.replace("_", "-") if argument.startswith("--") else argument for argument in LIGHT]
    assert main(["quantize", "--model", str(tiny), *arguments, "--output-dir", str(tmp_path)]) == 0


def test_interrupted(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("evenround.cli.run", interrupt)
    assert main(["quantize", str(tiny), *LIGHT, "--output_dir", str(tmp_path)]) == 130
    assert "run the same command again to go on" in capsys.readouterr().err
