"""Settings: defaults, limits, and the words with which a wrong value is refused."""

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from evenround.config import (
    COMPUTE_DTYPES,
    RECIPES,
    DataConfig,
    DeviceConfig,
    MixConfig,
    OutputConfig,
    TuneConfig,
    as_dict,
    mix_config,
    torch_dtype,
    tune_config,
)
from evenround.errors import UserError

OUT = Path("out")


def test_defaults_are_auto_rounds() -> None:
    config = TuneConfig()
    assert (config.iters, config.batch_size, config.gradient_accumulate_steps, config.nblocks, config.seed) == (200, 8, 1, 1, 42)
    assert config.step_size == config.clip_step_size == 1 / 200
    assert config.keep == "best" and config.minmax_tuning and config.quantized_inputs and config.momentum == 0
    assert config.clip_limit == 1 and not config.search_scales
    assert (DataConfig().nsamples, DataConfig().seqlen) == (128, 2048)
    assert OutputConfig(output_dir=OUT).formats == ("auto_round",)


def test_step_sizes_follow_each_other() -> None:
    assert TuneConfig(iters=0).step_size == 1
    assert TuneConfig(iters=50, lr=0.01).clip_step_size == 0.01
    assert TuneConfig(iters=50, lr=0.01, minmax_lr=0.002).clip_step_size == 0.002
    assert TuneConfig(iters=50, minmax_lr=0.002).step_size == 1 / 50
    assert TuneConfig(lr=1).step_size == 1


def config_of(recipe: str, **changes: object) -> TuneConfig:
    values: dict[str, object] = {"iters": None, "lr": None, "minmax_lr": None, "momentum": None, "keep": None, "opt_rtn": None}
    fixed = {"batch_size": 8, "gradient_accumulate_steps": 1, "minmax_tuning": True, "quantized_inputs": True, "nblocks": 1, "seed": 42}
    return tune_config(recipe, **{**values, **fixed, "enable_alg_ext": False, **changes})  # type: ignore[arg-type]


def test_recipes() -> None:
    assert {name: (recipe.iters, recipe.nsamples) for name, recipe in RECIPES.items()} == {
        "default": (200, 128), "best": (1000, 512), "light": (50, 128), "rtn": (0, 128), "opt-rtn": (0, 128), "auto-round": (200, 128),
    }  # fmt: skip
    default, upstream = config_of("default"), config_of("auto-round")
    assert (default.lr, default.minmax_lr, default.momentum, default.keep) == (1 / 200, 1 / 400, 0.8, "last")
    assert (upstream.lr, upstream.minmax_lr, upstream.momentum, upstream.keep) == (1 / 200, 1 / 200, 0.0, "best")
    assert (default.search_scales, default.clip_limit, upstream.search_scales, upstream.clip_limit) == (True, 2.0, False, 1.0)
    assert upstream == TuneConfig(lr=1 / 200, minmax_lr=1 / 200), "to the letter"


@pytest.mark.parametrize(
    ("recipe", "changes", "iters", "searched"),
    [
        ("rtn", {}, 0, False),
        ("rtn", {"opt_rtn": True}, 0, True),
        ("rtn", {"opt_rtn": False}, 0, False),
        ("opt-rtn", {}, 0, True),
        ("opt-rtn", {"opt_rtn": False}, 0, False),
        ("default", {"iters": 0}, 0, True),
        ("default", {"iters": 0, "opt_rtn": False}, 0, False),
        ("auto-round", {"iters": 0}, 0, True),
        ("rtn", {"iters": 10}, 10, True),
        ("auto-round", {"iters": 10}, 10, False),
        ("auto-round", {"enable_alg_ext": True}, 200, True),
    ],
)
def test_where_scales_are_searched(recipe: str, changes: dict[str, object], iters: int, searched: bool) -> None:
    config = config_of(recipe, **changes)
    assert (config.iters, config.search_scales) == (iters, searched)


def test_the_extension_begins_with_searched_scales_that_may_grow() -> None:
    config, plain = config_of("auto-round", enable_alg_ext=True), config_of("auto-round")
    assert (config.search_scales, config.clip_limit, plain.search_scales, plain.clip_limit) == (True, 2.0, False, 1.0)
    for recipe in ("default", "best", "light"):
        assert config_of(recipe, enable_alg_ext=True) == config_of(recipe), "they have it anyway"


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("beast", {}, f"no recipe 'beast' (--recipe); did you mean 'best'? Recipes: {', '.join(RECIPES)}"),
        ("zzz", {}, f"no recipe 'zzz' (--recipe). Recipes: {', '.join(RECIPES)}"),
        ("default", {"opt_rtn": True}, "--enable_opt_rtn is for --iters 0 and would change nothing with 200; leave it out"),
        ("light", {"opt_rtn": False}, "--disable_opt_rtn is for --iters 0 and would change nothing with 50; leave it out"),
        ("rtn", {"iters": 3, "opt_rtn": False}, "--disable_opt_rtn is for --iters 0 and would change nothing with 3; leave it out"),
        ("opt-rtn", {"enable_alg_ext": True}, "--enable_alg_ext is for tuning and would change nothing with --iters 0; leave it out"),
    ],
)
def test_recipes_and_flags_that_are_refused(recipe: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        config_of(recipe, **changes)
    assert str(caught.value) == message


def test_what_the_user_sets_wins_over_the_recipe() -> None:
    config = config_of("default", iters=10, momentum=0.0, keep="best", minmax_lr=0.3)
    assert (config.iters, config.lr, config.minmax_lr, config.momentum, config.keep) == (10, 0.01, 0.3, 0.0, "best")
    assert config_of("auto-round", iters=10).lr == 0.1
    assert config_of("default", lr=0.02).minmax_lr == 0.01


def test_mixed_precision() -> None:
    nothing = {"scheme": None, "bits": None}
    assert mix_config(None, None, {"scheme": "W4A16"}) is None
    assert (
        mix_config(3.0, "W2A16,W4A16", nothing)
        == mix_config(3.0, ["W2A16", "W4A16"], nothing)
        == MixConfig(avg_bits=3.0, options="W2A16,W4A16")
    )


@pytest.mark.parametrize(
    ("avg_bits", "options", "given", "message"),
    [
        *(
            (bits, options, {},
             "--avg_bits and --options go together: a mean number of bits, and the schemes to choose from, such as W2A16,W4A16")
            for bits, options in ((3.0, None), (None, "W2A16,W4A16"))
        ),
        (3.0, "W2A16,W4A16", {"bits": 4, "sym": None}, "--bits 4 is for one scheme, and --avg_bits chooses among --options; leave it out"),
        (3.0, "W2A16,W4A16", {"scheme": "W4A16"}, "--scheme W4A16 is for one scheme, and --avg_bits chooses among --options; leave it out"),
    ],
)  # fmt: skip
def test_mixed_precision_that_is_refused(avg_bits: float | None, options: str | None, given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        mix_config(avg_bits, options, given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TuneConfig(iters=-1), "--iters -1 must be a whole number of at least 0"),
        (lambda: TuneConfig(iters=2.5), "--iters 2.5 must be a whole number of at least 0"),  # type: ignore[arg-type]
        (lambda: TuneConfig(iters=True), "--iters True must be a whole number of at least 0"),
        (lambda: TuneConfig(batch_size=0), "--batch_size 0 must be a whole number of at least 1"),
        (lambda: TuneConfig(batch_size="8"), "--batch_size '8' must be a whole number of at least 1"),  # type: ignore[arg-type]
        (lambda: TuneConfig(gradient_accumulate_steps=0), "--gradient_accumulate_steps 0 must be a whole number of at least 1"),
        (lambda: TuneConfig(nblocks=0), "--nblocks 0 must be a whole number of at least 1"),
        (lambda: TuneConfig(seed=-1), "--seed -1 must be a whole number of at least 0"),
        (lambda: TuneConfig(seed=2**32), "--seed 4294967296 must be below 4294967296"),
        (lambda: TuneConfig(lr=0.0), "--lr 0.0 must be a positive number"),
        (lambda: TuneConfig(lr=float("nan")), "--lr nan must be a positive number"),
        (lambda: TuneConfig(lr=float("inf")), "--lr inf must be a positive number"),
        (lambda: TuneConfig(lr="0.1"), "--lr '0.1' must be a positive number"),  # type: ignore[arg-type]
        (lambda: TuneConfig(minmax_lr=-0.1), "--minmax_lr -0.1 must be a positive number"),
        (lambda: TuneConfig(momentum=1.0), "--momentum 1.0 must be a number of at least 0 and below 1"),
        (lambda: TuneConfig(momentum=-0.1), "--momentum -0.1 must be a number of at least 0 and below 1"),
        (lambda: TuneConfig(momentum=float("nan")), "--momentum nan must be a number of at least 0 and below 1"),
        (lambda: TuneConfig(momentum="0"), "--momentum '0' must be a number of at least 0 and below 1"),  # type: ignore[arg-type]
        (lambda: TuneConfig(clip_limit=0.0), "clip_limit 0.0 must be a positive number"),
        (lambda: TuneConfig(keep="first"), "keep 'first' must be 'best' or 'last' (--keep)"),  # type: ignore[arg-type]
        (lambda: DataConfig(nsamples=0), "--nsamples 0 must be a whole number of at least 1"),
        (lambda: DataConfig(seqlen=1), "--seqlen 1 must be a whole number of at least 2"),
        (lambda: OutputConfig(output_dir=OUT, formats=()), "--format is empty; use auto_round, llm_compressor or fake"),
        (lambda: OutputConfig(output_dir=OUT, formats=("fake", "fake")), "--format fake,fake names a format twice"),
        (lambda: OutputConfig(output_dir=OUT, max_shard_size=0), "--max_shard_size 0 must be a whole number of at least 1"),
        (
            lambda: DeviceConfig(output_device="cuda"),
            "--output_device 'cuda': only cpu can be given; where else layers go is for --placement",
        ),
        (
            lambda: DeviceConfig(compute_dtype="bf16"),  # type: ignore[arg-type]
            "--compute_dtype 'bf16' is not one of auto, float32, bfloat16, float16; did you mean 'bfloat16'?",
        ),
        (
            lambda: DeviceConfig(compute_dtype="int8"),  # type: ignore[arg-type]
            "--compute_dtype 'int8' is not one of auto, float32, bfloat16, float16",
        ),
    ],
)
def test_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == message


def test_the_largest_seed_seeds_the_generator_of_any_group() -> None:
    torch.Generator().manual_seed(TuneConfig(seed=2**32 - 1).seed * 1_000_003 + 100_000)


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        TuneConfig().iters = 3  # type: ignore[misc]


def test_names_of_dtypes() -> None:
    assert [torch_dtype(name) for name in COMPUTE_DTYPES[1:]] == [torch.float32, torch.bfloat16, torch.float16]


def test_settings_become_plain_json() -> None:
    values = as_dict(OutputConfig(output_dir=OUT, formats=("fake", "auto_round")))
    assert values == {"output_dir": "out", "formats": ["fake", "auto_round"], "max_shard_size": 5 * 10**9, "overwrite": False}
    for config in (TuneConfig(lr=0.1), DeviceConfig(), DataConfig(dataset="demo")):
        assert json.loads(json.dumps(as_dict(config))) == as_dict(config)
