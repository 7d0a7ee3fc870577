"""The command line: what a person types, what they are told when it is wrong, and what scripts get."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evenround.cli import NOT_YET, build_parser, main

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
    actions = build_parser()._subparsers._group_actions[0].choices["quantize"]._actions  # type: ignore[union-attr, index, call-overload]
    known = {option.lstrip("-") for action in actions for option in action.option_strings}
    assert not known & set(NOT_YET)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "W4A61"], "no scheme 'W4A61' (--scheme); did you mean 'W4A16'?"),
        (["--scheme", "MXFP4"], "scheme 'MXFP4' (--scheme) is not implemented yet"),
        (["--bits", "9"], "bits 9 (--bits) must be a whole number from 2 to 8"),
        (["--bits", "four"], "argument --bits/--bit: invalid int value: 'four'"),
        (["--group_size", "100"], "group_size 100 (--group_size) does not divide the width 256 of model.layers.0.self_attn.q_proj"),
        (["--iters", "-1"], "--iters -1 must be a whole number of at least 0"),
        (["--iters", "0"], "add --disable_opt_rtn"),
        (["--disable_opt_rtn"], "--disable_opt_rtn is for --iters 0 and would change nothing here"),
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
