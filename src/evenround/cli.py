"""The command line: `evenround quantize | plan | eval | verify | show`.

Flags are auto-round's, with `_` or `-`. A flag that auto-round has and Evenround does not yet implement is refused by name, never ignored;
an unknown flag is answered with the nearest known one. Progress and messages go to stderr, results to stdout.
Exit codes: 0 done; 1 `verify` found something wrong, or no plan fits; 2 wrong input; 130 interrupted (the same command goes on).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import transformers
from rich.console import Console

from evenround.api import request
from evenround.config import COMPUTE_DTYPES, PLACEMENTS, RECIPES
from evenround.errors import UserError, nearest
from evenround.evaluate import evaluate
from evenround.job import Job, Progress, plan_job
from evenround.pipeline import run
from evenround.plan import NothingFits
from evenround.plan_report import render_plan
from evenround.report import render_show, render_verification, show
from evenround.scheme import BITS_OF
from evenround.tasks import check_tasks, run_tasks
from evenround.terminal import Notes, TerminalProgress
from evenround.verify import verify
from evenround.version import __version__

DEVICES = (
    "auto, cpu, cuda:0, numbers (0,1,2,3), layer:device pairs, limits (cuda:0=70GiB,cuda:1), 4x24GiB (four, at most so much of each), "
    "sim:256MiB or sim:4x1GiB (simulated)"
)

EVAL_DEVICES = "as for quantize; a model is spread over several"

NOT_YET = (
    "model_dtype platform num_hidden_layers debug_layer_num algorithm algorithms alg algs alg_config alg_configs "
    "disable_low_cpu_mem_usage low_cpu_mem_usage disable_torch_compile shared_layers "
    "static_kv_dtype static_kv_granularity static_attention_dtype static_attention_granularity super_bits super_group_size scale_dtype "
    "to_quant_block_names enable_norm_bias_tuning enable_adam enable_lfq enable_neuqi awq_duo_scaling awq_n_grid awq_seqlen "
    "awq_smooth_batch_size awq_apply_clip awq_clip_as_init svdquant_rank rotation_type rotation_backend rotation_block_size r1 r2 r3 r4 "
    "ignore_scale_zp_bits enable_deterministic_algorithms model_free disable_model_free quant_nontext_module extra_data_dir template mllm "
    "eval_gen_kwargs fewshot_as_multiturn eval_task_by_task eval_backend vllm_args eval_model_dtype add_bos_token "
    "calibrate_all_experts memory_report"
).split()
"""auto-round's flags, and ours, that are recognized and refused."""


class _Parser(argparse.ArgumentParser):
    """argparse with `_` and `-` alike in flags, nearest names for unknown ones, and `UserError` in place of its exit."""

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        options, unknown = self.parse_known_args([_underscored(argument) for argument in arguments])
        for argument in unknown:
            options.parser.refuse(argument)
        return options

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def refuse(self, argument: str) -> NoReturn:
        """Say what is wrong with an argument that this command does not know."""
        if not argument.startswith("--"):
            raise UserError(f"unexpected argument {argument!r} (see {self.prog} --help)")
        flag = argument.split("=")[0]
        if flag.removeprefix("--") in NOT_YET:
            raise UserError(f"{flag} is not implemented yet; leave it out")
        flags = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        raise UserError(f"there is no flag {flag}{nearest(flag, flags)} (see {self.prog} --help)")


def _underscored(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value


class _Help(argparse.HelpFormatter):
    """Adds the default of flags that have one worth telling and do not tell it themselves."""

    def _get_help_string(self, action: argparse.Action) -> str:
        told = action.help or ""
        if action.default in (None, False, "", argparse.SUPPRESS) or "default" in told:
            return told
        return f"{told} (default: %(default)s)"


def _sub(commands: "argparse._SubParsersAction[_Parser]", name: str, help: str) -> _Parser:
    parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False, formatter_class=_Help)
    parser.set_defaults(parser=parser)
    return parser


def build_parser() -> _Parser:
    """The whole command line; `tools/cli_docs.py` writes docs/cli.md from it."""
    parser = _Parser(prog="evenround", description="Quantize large language models by block tuning.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"evenround {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="quantize | plan | eval | verify | show", parser_class=_Parser)
    _add_quantize(_sub(commands, "quantize", "quantize a model directory or hub id"))
    _add_plan(_sub(commands, "plan", "what goes on which device, to the byte, before a weight is read"))
    _add_eval(_sub(commands, "eval", "perplexity, and KL and top-1 agreement against the original"))
    _add_verify(_sub(commands, "verify", "read a checkpoint back and say what is wrong with it"))
    _add_show(_sub(commands, "show", "what a checkpoint or a run consists of"))
    return parser


def _add_plan(parser: _Parser) -> None:
    _add_job(parser)
    parser.description = (
        "What goes on which device, to the byte, before a weight is read. Takes the flags of quantize, of which those that change no "
        "memory change nothing here. MODEL may be a config.json; --device may "
        "name devices that are not here, with their memory: 4x80GiB, cuda:0=70GiB,cuda:1=24GiB"
    )


def _add_quantize(parser: _Parser) -> None:
    _add_job(parser)


def _add_job(parser: _Parser) -> None:
    add = parser.add_argument
    add("model", nargs="?", help="model directory, or hub id")
    add("--model", "--model_name", "--model_name_or_path", dest="model_flag", help="the same as a flag")
    add("--recipe", default="default", help=f"values for what is not given: {', '.join(RECIPES)}")
    group = parser.add_argument_group("scheme")
    add = group.add_argument
    add("--scheme", help="preset (default: W4A16), such as W4A16, W2A16G64, W3A16_ASYM, MXFP4, NVFP4, FP8_STATIC, INT8")
    add("--bits", "--bit", type=int, help="2 to 8, on top of the scheme")
    add("--group_size", type=_group_size, help="weights that share a scale; -1: per output channel; 0: per tensor; 128,128: tiles of FP8")
    add("--asym", action="store_true", help="asymmetric, with a zero point per group")
    add("--data_type", "--dtype", help=f"of weights: {', '.join(BITS_OF)}")
    add("--act_bits", type=int, help="quantize what enters layers, too: 8 or 4 bits")
    add("--act_group_size", type=int, help="values that share a scale; -1: per token; 0: the whole tensor")
    add("--act_asym", action="store_true", help="asymmetric, for int")
    add("--act_data_type", "--act_dtype", help="of activations (default: as the weights')")
    add("--disable_act_dynamic", action="store_true", help="one scale for the tensor, from calibration")
    add("--avg_bits", "--target_bits", type=float, help="choose a scheme for each layer: mean bits of a weight, scales counted")
    add("--options", "--schemes", help="schemes to choose from, such as W2A16,W3A16,W4A16; BF16: left alone")
    add("--layer_config", help='JSON: name, substring or regex -> preset or fields, e.g. {"down_proj": {"bits": 8}}')
    add("--ignore_layers", "--fp_layers", default="", help="comma list of names, substrings or regexes left in floating point")
    add("--quant_lm_head", action="store_true", help="quantize the output head, too")
    group = parser.add_argument_group("tuning")
    add = group.add_argument
    add("--iters", "--iter", type=int, help="steps per block; 0: round to nearest, with searched scales (default: the recipe's)")
    add("--batch_size", "--train_bs", "--bs", type=int, default=8, help="samples of one micro-step")
    add("--gradient_accumulate_steps", type=int, default=1, help="micro-steps per step")
    add("--lr", type=float, help="step size of the rounding offsets (default: 1 / iters, at most 0.01)")
    add("--minmax_lr", type=float, help="step size of the clip factors (default: the recipe's share of lr)")
    add("--momentum", type=float, help="decay of the averaged gradient whose sign is followed (default: the recipe's)")
    add("--disable_minmax_tuning", action="store_true", help="leave the clip factors at 1")
    add("--keep", choices=("best", "last"), help="the iterate with the lowest mini-batch loss, or the last (default: the recipe's)")
    add("--not_use_best_mse", action="store_true", help="the same as --keep last")
    add("--disable_quanted_input", action="store_true", help="tune each block on the float model's activations")
    add("--nblocks", type=int, default=1, help="consecutive blocks tuned together")
    add("--disable_opt_rtn", action="store_true", help="with iters 0: plain rounding, without a search for scales")
    add("--enable_opt_rtn", action="store_true", help="with iters 0: search for scales (this is how it is, unless the recipe is rtn)")
    add(
        "--enable_alg_ext",
        action="store_true",
        help="searched scales to begin with; all recipes but auto-round have them anyway",
    )
    add("--seed", type=int, default=42, help="decides rows, their order, everything random")
    group = parser.add_argument_group("calibration data")
    add = group.add_argument
    add("--dataset", help="text file (.txt .json .jsonl), `demo` (shipped text), or hub dataset (default NeelNanda/pile-10k)")
    add("--nsamples", "--nsample", type=int, help="rows of text (default: the recipe's)")
    add("--seqlen", "--seq_len", type=int, default=2048, help="tokens per row")
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--format", "--formats", default="auto_round", help="auto_round, llm_compressor, fake; several: a folder each")
    add("--output_dir", default="./tmp_autoround", help="one format is written straight into it")
    add("--max_shard_size", default="5GB", help="largest file, such as 5GB or 500MB")
    add("--overwrite", action="store_true", help="start anew over what is in output_dir")
    add("--json", action="store_true", help="print a summary of the run record to stdout")
    group = parser.add_argument_group("machine")
    add = group.add_argument
    add("--device", "--device_map", "--devices", "--device_ids", default="auto", help=DEVICES)
    add("--placement", default="auto", help=f"{', '.join(PLACEMENTS)}, or JSON: module -> number of a device")
    add("--low_gpu_mem_usage", action="store_true", help="keep the inputs of blocks off the devices, in host memory or on disk")
    add("--output_device", help="cpu: only quantized layers are on devices, the rest of a block runs on the CPU")
    add("--enable_torch_compile", action="store_true", help="run blocks through torch.compile")
    add("--compute_dtype", choices=COMPUTE_DTYPES, default="auto", help="auto: the model's own where the device multiplies it natively")
    add("--disable_amp", action="store_true", help="compute in float32")
    _add_trust(parser)
    group = parser.add_argument_group("evaluation afterwards (needs lm-eval)")
    add = group.add_argument
    add("--tasks", "--task", default="", help="comma list of lm-eval tasks, or YAML files of tasks")
    add("--eval_bs", type=int, help="batch size of the evaluation (default: 8)")
    add("--limit", type=int, help="samples per task")
    add("--num_fewshot", type=int, help="examples in the prompt")


def _add_trust(parser: _Parser) -> None:
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    parser.add_argument("--disable_trust_remote_code", action="store_true", help="do not (this is how it is without either flag)")


def _trusted(options: argparse.Namespace) -> bool:
    if options.trust_remote_code and options.disable_trust_remote_code:
        raise UserError("--trust_remote_code and --disable_trust_remote_code contradict each other; give one")
    return bool(options.trust_remote_code)


def _add_eval(parser: _Parser) -> None:
    parser.add_argument("model", help="checkpoint directory: float, auto_round, llm_compressor or fake")
    parser.add_argument("--reference", help="the original, for KL and top-1 agreement")
    parser.add_argument("--text", required=True, help="plain text file, or demo (shipped text)")
    parser.add_argument("--seqlen", type=int, help="tokens per row (default: what the model takes, 2048 at most)")
    parser.add_argument("--rows", type=int, help="at most this many rows (default: all of the text)")
    parser.add_argument("--batch_size", "--eval_bs", type=int, default=8, help="rows at once")
    parser.add_argument(
        "--device",
        "--device_map",
        "--devices",
        "--device_ids",
        default="auto",
        help=EVAL_DEVICES,
    )
    _add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_verify(parser: _Parser) -> None:
    parser.add_argument("checkpoint", help="directory of a quantized checkpoint")
    parser.add_argument("--reference", help="the original: adds the error of each layer, and the loss on a short text")
    _add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_show(parser: _Parser) -> None:
    parser.add_argument("path", help="checkpoint, or output directory of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _request(options: argparse.Namespace, progress: Progress | None) -> tuple[Job, Progress | None]:
    """The job that the flags ask for. Raises `UserError` for flags that contradict each other."""
    model = options.model or options.model_flag
    if model is None:
        raise UserError(f"no model given: evenround {options.command} MODEL_DIRECTORY …")
    if options.model and options.model_flag and options.model != options.model_flag:
        raise UserError(f"two models given: {options.model!r} and --model {options.model_flag!r}")
    if options.not_use_best_mse and options.keep == "best":
        raise UserError("--not_use_best_mse asks for the last iterate, --keep best for the best; give one")
    if options.disable_amp and options.compute_dtype not in ("auto", "float32"):
        raise UserError(f"--disable_amp asks for float32, --compute_dtype for {options.compute_dtype}; give one")
    return request(
        model,
        options.output_dir,
        scheme=options.scheme,
        bits=options.bits,
        group_size=options.group_size,
        sym=False if options.asym else None,
        data_type=options.data_type,
        act_bits=options.act_bits,
        act_group_size=options.act_group_size,
        act_sym=False if options.act_asym else None,
        act_data_type=options.act_data_type,
        act_dynamic=False if options.disable_act_dynamic else None,
        avg_bits=options.avg_bits,
        options=options.options,
        layer_config=_text_of(options.layer_config),
        ignore_layers=options.ignore_layers,
        quant_lm_head=options.quant_lm_head,
        recipe=options.recipe,
        iters=options.iters,
        nsamples=options.nsamples,
        seqlen=options.seqlen,
        batch_size=options.batch_size,
        gradient_accumulate_steps=options.gradient_accumulate_steps,
        lr=options.lr,
        minmax_lr=options.minmax_lr,
        momentum=options.momentum,
        enable_minmax_tuning=not options.disable_minmax_tuning,
        keep="last" if options.not_use_best_mse else options.keep,
        enable_quanted_input=not options.disable_quanted_input,
        opt_rtn=_either(options, "opt_rtn"),
        enable_alg_ext=options.enable_alg_ext,
        nblocks=options.nblocks,
        dataset=options.dataset,
        seed=options.seed,
        format=options.format,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
        device_map=options.device,
        placement=options.placement,
        low_gpu_mem_usage=options.low_gpu_mem_usage,
        output_device=options.output_device,
        enable_torch_compile=options.enable_torch_compile,
        compute_dtype="float32" if options.disable_amp else options.compute_dtype,
        trust_remote_code=_trusted(options),
        progress=progress,
    )


def _either(options: argparse.Namespace, what: str) -> bool | None:
    """`--enable_…` is True, `--disable_…` False, neither None. Raises `UserError` for both."""
    on, off = vars(options)[f"enable_{what}"], vars(options)[f"disable_{what}"]
    if on and off:
        raise UserError(f"--enable_{what} and --disable_{what} contradict each other; give one")
    return True if on else False if off else None


def _group_size(text: str) -> int | tuple[int, ...]:
    """`128`, `-1`, or `128,128`. Raises `argparse.ArgumentTypeError`, whose text the parser shows."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, or two with a comma between them, such as 128,128") from None
    return sizes[0] if len(sizes) == 1 else sizes


def _tasks_of(options: argparse.Namespace) -> list[str]:
    tasks = [task for task in options.tasks.split(",") if task]
    for flag, value in (("--eval_bs", options.eval_bs), ("--limit", options.limit), ("--num_fewshot", options.num_fewshot)):
        if value is not None and not tasks:
            raise UserError(f"{flag} {value} is for --tasks; name some, or leave it out")
    if tasks:
        check_tasks(tasks)
    return tasks


def _quantize(options: argparse.Namespace, out: Console, err: Console) -> int:
    with TerminalProgress(err) as progress:
        job, _ = _request(options, progress)
        tasks = _tasks_of(options)
        record = run(job, progress)
    summary: dict[str, object] = {"output_dir": options.output_dir, **{key: record[key] for key in SUMMARY}}
    if tasks:
        folder = Path(options.output_dir)
        last = options.format.split(",")[-1].strip()
        checkpoint = folder if (folder / "config.json").exists() else folder / last
        summary["tasks"] = run_tasks(
            checkpoint, tasks, options.eval_bs or 8, options.limit, options.num_fewshot, options.device, _trusted(options)
        )
    if options.json:
        out.print_json(json.dumps(summary))
    else:
        out.print(*render_show(show(Path(options.output_dir))), sep="\n")
        if tasks:
            out.print_json(json.dumps(summary["tasks"]))
    return 0


def _plan(options: argparse.Namespace, out: Console, err: Console) -> int:
    notes = Notes(err)
    job, _ = _request(options, notes)
    plan = plan_job(job, notes)
    if options.json:
        out.print_json(json.dumps(plan.to_dict()))
    else:
        out.print(*render_plan(plan, full=True), sep="\n")
    return 0 if plan.fits else 1


SUMMARY = ("model", "architecture", "formats", "quantized_weights", "source_bytes", "totals", "calibration_notes")
"""Keys of the run record that `quantize --json` prints."""


def _eval(options: argparse.Namespace, out: Console, err: Console) -> int:
    reference = Path(options.reference) if options.reference else None
    result = evaluate(
        Path(options.model),
        reference,
        Path(options.text),
        seqlen=options.seqlen,
        rows=options.rows,
        batch_size=options.batch_size,
        device=options.device,
        trust_remote_code=_trusted(options),
    )
    for note in result.notes:
        err.print(f"note: {note}", markup=False, highlight=False)
    values = result.to_dict()
    if options.json:
        out.print_json(json.dumps(values))
    else:
        for key, value in values.items():
            out.print(f"{key:>22}  {value:.6g}" if isinstance(value, float) else f"{key:>22}  {value}", highlight=False)
    return 0


def _verify(options: argparse.Namespace, out: Console, err: Console) -> int:
    reference = Path(options.reference) if options.reference else None
    result = verify(Path(options.checkpoint), reference, trust_remote_code=_trusted(options))
    if options.json:
        out.print_json(json.dumps(result.to_dict()))
    else:
        out.print(*render_verification(result), sep="\n")
    return 0 if result.ok else 1


def _show(options: argparse.Namespace, out: Console, err: Console) -> int:
    values = show(Path(options.path))
    if options.json:
        out.print_json(json.dumps(values))
    else:
        out.print(*render_show(values), sep="\n")
    return 0


def _text_of(value: str | None) -> str | None:
    """`--layer_config` itself, or what the file of that name says."""
    if value is None or "{" in value or not Path(value).is_file():
        return value
    return Path(value).read_text(encoding="utf-8")


def _how_to_go_on(options: argparse.Namespace | None) -> str:
    if options is None or options.command != "quantize":
        return ""
    without = " without --overwrite" if options.overwrite else ""
    return f"; run the same command{without} again to go on where it stopped, also on other devices"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    out, err = (
        Console(stderr=stderr, width=None if stream.isatty() else 160) for stream, stderr in ((sys.stdout, False), (sys.stderr, True))
    )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = None
    try:
        options = build_parser().parse(sys.argv[1:] if arguments is None else arguments)
        command = {"quantize": _quantize, "plan": _plan, "eval": _eval, "verify": _verify, "show": _show}[options.command]
        return command(options, out, err)
    except NothingFits as error:
        err.print(f"evenround: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except UserError as error:
        err.print(f"evenround: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        err.print(f"evenround: interrupted{_how_to_go_on(options)}", style="bold", highlight=False)
        return 130
    except torch.OutOfMemoryError as error:
        advice = _how_to_go_on(options) or "; use larger devices or more of them, or a smaller --batch_size or --seqlen"
        err.print(
            f"evenround: out of memory: {error}{advice}",
            style="bold red",
            markup=False,
            highlight=False,
        )
        return 2
