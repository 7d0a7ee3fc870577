"""Judging a checkpoint: perplexity on a text, and how far its predictions are from the original's.

Logits are a vocabulary wide, so they are made for a few positions at a time: the base model runs once, and the model's own forward runs
on slices of its output, which keeps whatever an architecture does around its head (scaling, soft caps). Memory is that of the two models
and one batch. What we gave up: rows stand alone, there is no sliding window.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.utils.generic import ModelOutput

from evenround.calls import embed, outside_blocks, recording
from evenround.chains import HOST, Chain, Home
from evenround.data import evaluation_text
from evenround.documents import DEMO
from evenround.errors import UserError
from evenround.loading import check_folder, load_model, load_tokenizer
from evenround.memory.devices import parse_devices
from evenround.memory.stage import spread, stage
from evenround.model import Skeleton, find_blocks, load_config, max_length

__all__ = ["Evaluation", "evaluate", "load_model", "streamed_loss", "text_rows"]

CHUNK = 1 << 24
"""Logits made at once: 64 MiB of float32."""

DEFAULT_SEQLEN = 2048
"""Tokens a row when nobody says and the model takes as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How a model predicts a text, alone and compared with a reference."""

    perplexity: float
    """exp of the mean negative log likelihood of each token after the first of its row."""
    reference_perplexity: float | None
    kl: float | None
    """Mean over all positions of KL(reference ‖ model), in nats per token."""
    top1: float | None
    """Share of positions where both find the same token most likely."""
    tokens: int
    """Positions: rows times tokens per row."""
    notes: tuple[str, ...] = ()
    """What the user should know about the numbers."""

    def to_dict(self) -> dict[str, object]:
        """The figures for JSON, without notes."""
        return {key: value for key, value in asdict(self).items() if key != "notes"}


def evaluate(
    model: Path,
    reference: Path | None,
    text: Path,
    *,
    seqlen: int | None = None,
    rows: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Evaluation:
    """Evaluate checkpoint `model` on `text` (`demo`: the text that ships for this) in float32, against `reference` if there is one.

    The text is tokenized with the model's tokenizer and cut into consecutive rows of `seqlen` tokens (None: as many as the model takes, at
    most 2048), of which the first `rows` are used; a rest shorter than a row is left out. Raises `UserError` for a missing or empty text, a
    missing tokenizer, other vocabularies, and models that cannot be loaded or give NaN.
    """
    content = _read_text(text)
    for flag, value, least in (("--seqlen", seqlen, 2), ("--rows", rows, 1), ("--batch_size", batch_size, 1)):
        if value is not None and value < least:
            raise UserError(f"{flag} {value} must be at least {least}")
    check_folder(model)
    if reference is not None:
        check_folder(reference, "--reference")
    tokenizer = load_tokenizer(model, trust_remote_code)
    if tokenizer is None:
        raise UserError(f"{model} has no tokenizer files; copy the original's there")
    config = load_config(model, trust_remote_code)
    if reference is not None:
        _check_vocabularies(model, tokenizer, config, reference, trust_remote_code)
    tokens, notes = text_rows(content, str(text), tokenizer, _row_length(seqlen, max_length(config)), rows)
    highest, size = int(tokens.max()), int(config.get_text_config().vocab_size)
    if highest >= size:
        raise UserError(f"the tokenizer in {model} gives token id {highest}, the model has {size} tokens; copy the original's tokenizer")
    models = [load_model(path, torch.float32, trust_remote_code)[0] for path in (model, reference) if path is not None]
    sums = _Sums()
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(stage(parse_devices(device))).where
        for loaded in models:
            stack.enter_context(spread(loaded, find_blocks(loaded), where))
        with torch.inference_mode():
            for start in range(0, len(tokens), batch_size):
                _add(sums, models, tokens[start : start + batch_size].to(where[0]))
    return _result(sums, notes, model, reference)


def _read_text(path: Path) -> str:
    if str(path) == DEMO:
        path = evaluation_text()
    if path.suffix.lower() in (".json", ".jsonl"):
        raise UserError(f"text {path} (--text) is JSON, and eval reads plain text; extract the text first")
    if path.is_dir():
        raise UserError(f"text {path} (--text) is a directory; give a text file")
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"text {path} (--text) cannot be read: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"text {path} (--text) is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    if not content.strip():
        raise UserError(f"text {path} (--text) is empty; give a file with some pages of text")
    return content


def _row_length(wish: int | None, longest: int | None) -> int:
    if wish is None:
        return min(longest or DEFAULT_SEQLEN, DEFAULT_SEQLEN)
    if longest is not None and wish > longest:
        raise UserError(f"--seqlen {wish} is more than the {longest} tokens that the model takes; use --seqlen {longest}")
    return wish


def text_rows(text: str, place: str, tokenizer: PreTrainedTokenizerBase, seqlen: int, rows: int | None) -> tuple[Tensor, tuple[str, ...]]:
    """Consecutive rows of `text`, int64 `[rows, tokens]`, and notes. Each row begins with what the tokenizer puts before a text.

    Raises `UserError` when there are not even two tokens.
    """
    bare, full, ids = (
        tokenizer(part, add_special_tokens=added, verbose=False)["input_ids"] for part, added in (("a", False), ("a", True), (text, False))
    )
    prefix = full[: next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)]
    if len(prefix) + len(ids) < 2:
        raise UserError(f"text {place} (--text) gives {len(ids)} token(s), at least 2 are needed; give a longer text")
    notes = []
    width = max(1, seqlen - len(prefix))
    if len(ids) < width:
        notes.append(f"text {place} gives one row of {len(prefix) + len(ids)} tokens, shorter than the {seqlen} of a row")
        width = len(ids)
    cut = torch.tensor(ids[: len(ids) // width * width]).view(-1, width)
    if rows is not None and len(cut) < rows:
        notes.append(f"asked {rows} rows of {seqlen} tokens, text {place} gives {len(cut)}")
    cut = cut[:rows]
    return torch.cat([torch.tensor(prefix, dtype=torch.int64).expand(len(cut), -1), cut], dim=1), tuple(notes)


def _check_vocabularies(
    model: Path, tokenizer: PreTrainedTokenizerBase, config: transformers.PretrainedConfig, reference: Path, trust_remote_code: bool
) -> None:
    other = load_tokenizer(reference, trust_remote_code)
    sizes = [int(each.get_text_config().vocab_size) for each in (config, load_config(reference, trust_remote_code))]
    if sizes[0] != sizes[1]:
        raise UserError(f"{model} has {sizes[0]} tokens, --reference {reference} has {sizes[1]}; the reference must be the original")
    if other is not None and other.get_vocab() != tokenizer.get_vocab():
        raise UserError(f"the tokenizers of {model} and --reference {reference} differ; the reference must be the original")


@dataclass(slots=True)
class _Sums:
    """Sums over positions; index 0 of `loss` is the model, 1 the reference."""

    loss: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kl: float = 0.0
    agree: int = 0
    positions: int = 0
    predicted: int = 0


def _run_body(model: nn.Module, tokens: Tensor) -> tuple[nn.Module, ModelOutput]:
    """The module whose output the model's own forward hands to its head (`model.model`, OPT's `model.model.decoder`), and that output."""
    ended: list[tuple[nn.Module, ModelOutput]] = []

    def ends(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, ModelOutput) and "last_hidden_state" in output:
            ended.append((module, output))

    hooks = [module.register_forward_hook(ends) for module in model.modules() if module is not model]
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    head.forward = lambda hidden: hidden[..., :1]
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        del head.forward
        for hook in hooks:
            hook.remove()
    if not ended:
        raise UserError(f"{type(model).__name__} cannot be evaluated: its base model returns no last_hidden_state")
    return ended[-1]


def _logits(model: nn.Module, tokens: Tensor, body: nn.Module, output: ModelOutput, at: slice) -> Tensor:
    """Logits `[rows, positions, vocabulary]` of the model at positions `at`, from what `_run_body` gave for `tokens` `[rows, tokens]`."""
    part = type(output)(**{**output, "last_hidden_state": output["last_hidden_state"][:, at]})
    body.forward = lambda *args, **kwargs: part
    try:
        return model(input_ids=tokens[:, at], use_cache=False).logits  # type: ignore[no-any-return]
    finally:
        del body.forward


def _add(sums: _Sums, models: Sequence[nn.Module], tokens: Tensor) -> None:
    """Add rows `tokens` `[rows, tokens]` for the model and, if there are two models, the reference."""
    bodies = [_run_body(model, tokens) for model in models]
    vocabulary = int(models[0].config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    step = max(1, CHUNK // (len(tokens) * vocabulary))
    for start in range(0, tokens.shape[1], step):
        at = slice(start, start + step)
        targets = tokens[:, start + 1 : start + step + 1]
        log_p: list[Tensor] = []
        for number, (model, (body, output)) in enumerate(zip(models, bodies, strict=True)):
            log_p.append(torch.log_softmax(_logits(model, tokens, body, output, at).float(), dim=-1))
            found = log_p[-1][:, : targets.shape[1]].gather(-1, targets.unsqueeze(-1))
            sums.loss[number] -= float(found.sum(dtype=torch.float64))
        if len(log_p) == 2:
            quantized, original = log_p
            sums.agree += int((quantized.argmax(-1) == original.argmax(-1)).sum())
            sums.kl += float((original.exp() * (original - quantized)).sum(dtype=torch.float64))
        sums.positions += log_p[0].shape[0] * log_p[0].shape[1]
        sums.predicted += targets.numel()


def _result(sums: _Sums, notes: tuple[str, ...], model: Path, reference: Path | None) -> Evaluation:
    for path, loss in ((model, sums.loss[0] + sums.kl), (reference, sums.loss[1])):
        if not math.isfinite(loss):
            raise UserError(f"{path} predicts NaN or infinities on this text; `evenround verify {path}` finds out why")
    perplexity, reference_perplexity = (math.exp(min(loss / sums.predicted, 700.0)) for loss in sums.loss)
    return Evaluation(
        perplexity=perplexity,
        reference_perplexity=reference_perplexity if reference else None,
        kl=sums.kl / sums.positions if reference else None,
        top1=sums.agree / sums.positions if reference else None,
        tokens=sums.positions,
        notes=notes,
    )


def streamed_loss(skeleton: Skeleton, tokens: Tensor) -> float:
    """Mean negative log likelihood of `tokens` `[1, tokens]` in float32 on the CPU, one block in memory at a time."""
    embedded = embed(skeleton, tokens, None, torch.float32, lambda shape: Chain.empty(shape, torch.float32, (Home(HOST, 1),)))
    assert embedded.hidden is not None
    hidden = embedded.hidden.read([0], HOST)
    with torch.no_grad():
        for name, call in zip(skeleton.block_names, embedded.calls, strict=True):
            with skeleton.materialized([name], torch.float32):
                hidden = call.run(skeleton.model.get_submodule(name), hidden, [0])
        outside = [*outside_blocks(skeleton), skeleton.sites[-1].name]
        with skeleton.materialized(outside, torch.float32), recording(skeleton, replace=hidden):
            logits = skeleton.model(input_ids=tokens, use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:]))
