"""Calibration text → rows of token ids.

What: `load_calibration` turns a file, a hub dataset, a mixture of them, or data in memory into `TokenRows`: `[rows, seqlen]` and a mask.

Why this way: rows without padding make every token of a step count. A document of at least `seqlen` tokens starts a row of its own; what
is left of it and all shorter documents are packed into further rows, in order, with the end-of-text token between documents, so nothing but
one tail is lost. Second and later rows of a document are used only when there are too few others: many documents calibrate better than one.
Documents are drawn by a generator that `seed` alone decides, and tokenized until there are rows enough. A `.txt` file is one document,
cut in consecutive rows that are shuffled. Token ids that the caller made are kept in their order, never shuffled.

What we gave up: a row may begin within a document (and then without the token that marks a beginning), and attention within a row crosses
documents.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from evenround.documents import (
    DEFAULT_DATASET,
    INSTEAD,
    DatasetSpec,
    Document,
    Message,
    Placed,
    memory_documents,
    parse_dataset,
    read_documents,
)
from evenround.errors import UserError

BLOCK = 100_000


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """What calibration runs on."""

    tokens: Tensor
    """int64 `[rows, seqlen]`; `seqlen` may be less than asked (see `notes`)."""
    mask: Tensor | None
    """bool `[rows, seqlen]`, False where padded (always at a row's end); None: every token counts."""
    notes: tuple[str, ...]
    """Warnings with numbers, for the log and the run record."""
    source: str

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over shape, tokens and mask; equal on every platform."""
        digest = hashlib.sha256(json.dumps([*self.tokens.shape, self.mask is not None]).encode())
        digest.update(self.tokens.contiguous().numpy().astype("<i8").tobytes())
        if self.mask is not None:
            digest.update(self.mask.contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """What rows are wanted, and of which tokenizer."""

    tokenizer: PreTrainedTokenizerBase | None
    nsamples: int
    seqlen: int
    seed: int
    vocabulary: int | None

    def shuffled(self, count: int) -> list[int]:
        order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed)).tolist()
        return order


def load_calibration(
    dataset: str | Path | Tensor | Mapping[str, object] | Sequence[object] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    nsamples: int,
    seqlen: int,
    seed: int,
    max_length: int | None,
    vocab_size: int | None = None,
) -> TokenRows:
    """At most `nsamples` rows of `seqlen` tokens; the same seed gives the same rows on any platform.

    `dataset`: None (pile-10k); a name or path or mixture (see `DatasetSpec`; `demo` is the shipped text); or in memory: texts, chats (lists
    of messages), dicts (`text`, `messages`, `conversations` or `input_ids` with `attention_mask`), token ids `[rows, n]` or a list.
    Token rows longer than `seqlen` are cut; shorter ones keep the tokens under their mask and are padded at the end to the longest.
    `max_length`: positions of the model, None when unknown. `vocab_size`: rows of the model's embedding; None: the tokenizer's length.
    Raises UserError for anything unreadable, or for no row at all.
    """
    for flag, number in (("--nsamples", nsamples), ("--seqlen", seqlen)):
        if number < 1:
            raise UserError(f"{flag} {number} is not a positive number; give 1 or more")
    limit = seqlen if max_length is None else min(seqlen, max_length)
    vocabulary = len(tokenizer) if vocab_size is None and tokenizer is not None else vocab_size
    wish = _Wish(tokenizer=tokenizer, nsamples=nsamples, seqlen=limit, seed=seed, vocabulary=vocabulary)
    if dataset is None or isinstance(dataset, str):
        specs = parse_dataset(DEFAULT_DATASET if dataset is None else dataset)
        (rows, notes), source = _mix(specs, wish), ",".join(spec.name for spec in specs)
    elif isinstance(dataset, Path):
        spec, source = DatasetSpec(name=str(dataset)), str(dataset)
        documents, notes = read_documents(spec, is_path=True)
        rows = _rows_of(documents, spec, wish)
    else:
        source = "dataset"
        found, notes = memory_documents(dataset)
        rows = _rows_of(found, DatasetSpec(name=source), wish)
    clamped = f"--seqlen {seqlen} is more than the model's {max_length} positions; {limit} is used"
    return _stack(rows[:nsamples], wish, source, [*notes, clamped] if limit < seqlen else notes)


def _mix(specs: Sequence[DatasetSpec], wish: _Wish) -> tuple[list[Tensor], list[str]]:
    """Rows of all members: `num` of those that say so, even shares of the others, gaps filled from those with rows to spare; shuffled.

    Also notes.
    """
    found: list[list[Tensor]] = []
    notes: list[str] = []
    for spec in specs:
        documents, said = read_documents(spec)
        found.append(_rows_of(documents, spec, wish)[: spec.num])
        notes += said
    if len(specs) == 1:
        return found[0], notes
    take = [len(rows) for rows in found]
    remaining = max(0, wish.nsamples - sum(count for spec, count in zip(specs, take, strict=True) if spec.num is not None))
    shared = sorted((at for at, spec in enumerate(specs) if spec.num is None), key=lambda at: take[at])
    for turn, at in enumerate(shared):  # the smallest first, so that what it lacks is shared out
        take[at] = min(take[at], -(-remaining // (len(shared) - turn)))
        remaining -= take[at]
    rows = [row for member, count in zip(found, take, strict=True) for row in member[:count]]
    return [rows[at] for at in wish.shuffled(len(rows))], notes


def _rows_of(documents: str | list[Placed], spec: DatasetSpec, wish: _Wish) -> list[Tensor]:
    """At most `nsamples` rows of one member; a str is one text, to be cut in consecutive rows."""
    if isinstance(documents, str):
        text = _encode(_need(wish.tokenizer, spec.name), documents)
        rows = list(text[: len(text) // wish.seqlen * wish.seqlen].view(-1, wish.seqlen))
        if not rows:
            raise _too_short(spec.name, len(text), wish.seqlen)
        return [rows[at] for at in wish.shuffled(len(rows))][: wish.nsamples]
    ids = [(place, row) for place, document in documents if _is_tokens(document) for row in document if isinstance(row, Tensor)]
    if ids:
        if not all(_is_tokens(document) for _, document in documents):
            raise UserError(f"--dataset {spec.name!r} mixes token ids with text; give one kind")
        return [_clean(row, place, wish) for place, row in ids[: wish.nsamples]]
    documents = [(place, document) for place, document in documents if not isinstance(document, str) or document.strip()]
    if not documents:
        raise UserError(f"--dataset {spec.name!r} holds no document with text; {INSTEAD}")
    tokenizer = _need(wish.tokenizer, spec.name)
    encoded = (_encode_document(*documents[at], spec, tokenizer) for at in wish.shuffled(len(documents)))
    first, further, tokens = pack(encoded, wish.seqlen, separator=tokenizer.eos_token_id, enough=wish.nsamples, concat=spec.concat)
    if not first:
        raise _too_short(spec.name, tokens, wish.seqlen)
    return (first + [further[at] for at in wish.shuffled(len(further))])[: wish.nsamples]


def pack(
    documents: Iterable[Tensor], seqlen: int, *, separator: int | None, enough: int, concat: bool = False
) -> tuple[list[Tensor], list[Tensor], int]:
    """Rows `[seqlen]` of tokenized documents (1-D int64) → (first, further, tokens read).

    `first`: the first `seqlen` tokens of each long document, and the rows packed from short documents and the ends of long ones, in order,
    `separator` between them. `further`: the other full pieces of long documents. Only a last incomplete row is lost. `concat`: everything
    is packed as one stream. Stops after the document that brings `first` to `enough` rows.
    """
    first: list[Tensor] = []
    further: list[Tensor] = []
    pool = torch.empty(0, dtype=torch.int64)
    tokens = 0
    for document in documents:
        tokens += len(document)
        whole = 0 if concat else len(document) // seqlen * seqlen
        pieces = list(document[:whole].view(-1, seqlen))
        first += pieces[:1]
        further += pieces[1:]
        if whole < len(document):
            between = [separator] if separator is not None and len(pool) and int(pool[-1]) != separator else []
            pool = torch.cat([pool, torch.tensor(between, dtype=torch.int64), document[whole:]])
        full = len(pool) // seqlen * seqlen
        first += pool[:full].view(-1, seqlen)
        pool = pool[full:]
        if len(first) >= enough:
            break
    return first, further, tokens


def _too_short(name: str, tokens: int, seqlen: int) -> UserError:
    works = f" or --seqlen {tokens} or less" if tokens else ""
    return UserError(f"--dataset {name!r} holds {tokens} tokens, less than one row of --seqlen {seqlen}; give more text{works}")


def _need(tokenizer: PreTrainedTokenizerBase | None, name: str) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        fix = "put its tokenizer files beside it, or pass token ids"
        raise UserError(f"--dataset {name!r} is text, and the model has no tokenizer that can be loaded; {fix}")
    return tokenizer


def _is_tokens(document: Document) -> bool:
    return isinstance(document, list) and isinstance(document[0], Tensor)


def _encode_document(place: str, document: Document, spec: DatasetSpec, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """1-D ids of a text or, through the chat template, of messages."""
    messages: list[Message] = [{"role": "user", "content": document}] if isinstance(document, str) else [*document]
    chat = not isinstance(document, str) or spec.system_prompt is not None
    if spec.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": spec.system_prompt})
    if not (chat if spec.apply_chat_template is None else spec.apply_chat_template):
        return _encode(tokenizer, "\n\n".join(str(message.get("content") or "") for message in messages))
    if tokenizer.chat_template is None:
        raise UserError(f"{place}: the tokenizer has no chat template; give plain text, or join messages with :apply_chat_template=false")
    try:
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(f"{place}: the chat template refuses the messages ({error}); mend them or add :apply_chat_template=false") from None
    return _encode(tokenizer, rendered, special=False)  # a chat template writes its own special tokens


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = True) -> Tensor:
    """1-D ids; `special`: with the tokens that the tokenizer puts around a text.

    A long text is tokenized in blocks of 100 000 characters that end before a word, where byte-level tokenizers split anyway; those that
    mark the beginning of a text (sentencepiece) give one more token a block.
    """
    clean = text.encode("utf-8", "replace").decode()  # JSON may hold half surrogate pairs
    parts = tokenizer(list(blocks(clean)), add_special_tokens=False, verbose=False)["input_ids"]
    if special:
        bare, full = (tokenizer("a", add_special_tokens=added, verbose=False)["input_ids"] for added in (False, True))
        at = next((at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare), 0)
        parts = [full[:at], *parts, full[at + len(bare) :]]
    return torch.cat([torch.tensor(part, dtype=torch.int64) for part in parts])


def blocks(text: str, size: int = BLOCK) -> Iterator[str]:
    """Consecutive pieces of at most `size` characters that end before the first word of a line, else before a space."""
    start = 0
    while len(text) - start > size:
        window = text[start : start + size]
        ends = [match.end() for match in re.finditer(r"\n(?=\S)", window)]
        cut = ends[-1] if ends else window.rfind(" ")
        cut = cut if cut > 0 else size
        yield window[:cut]
        start += cut
    yield text[start:]


def _clean(row: Tensor, place: str, wish: _Wish) -> Tensor:
    """A row of the caller's ids without trailing padding, within the vocabulary."""
    pad, eos = (None, None) if wish.tokenizer is None else (wish.tokenizer.pad_token_id, wish.tokenizer.eos_token_id)
    if pad is not None:
        kept = torch.nonzero(row != pad)
        end = int(kept[-1]) + 1 if len(kept) else 0
        row = row[: end + (pad == eos and end > 0)]  # the first of a run of end-of-text tokens is text
    if not len(row):
        raise UserError(f"{place}: a row has no tokens but padding; leave it out")
    low, high = int(row.min()), int(row.max())
    if low < 0 or (wish.vocabulary is not None and high >= wish.vocabulary):
        size = "" if wish.vocabulary is None else f" of {wish.vocabulary}"
        raise UserError(f"{place}: token id {low if low < 0 else high} is outside the vocabulary{size}; is it from this model's tokenizer?")
    return row


def _stack(rows: list[Tensor], wish: _Wish, source: str, notes: list[str]) -> TokenRows:
    """Rows of at most `seqlen` tokens, padded at the end to the longest."""
    longer = sum(len(row) > wish.seqlen for row in rows)
    width = min(wish.seqlen, max(len(row) for row in rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for at, row in enumerate(rows):
        tokens[at, : len(row)], mask[at, : len(row)] = row[:width], True
    highest = int(tokens.max())
    if wish.vocabulary is not None and highest >= wish.vocabulary:
        raise UserError(f"the tokenizer gives token id {highest}, the model has {wish.vocabulary} tokens; use the model's own tokenizer")
    if len(rows) < wish.nsamples:
        notes.append(f"asked {wish.nsamples} rows of {wish.seqlen} tokens, {source} gives {len(rows)}")
    if longer:
        notes.append(f"{longer} of {len(rows)} rows are longer than --seqlen {wish.seqlen} and were cut")
    if width < wish.seqlen:
        notes.append(f"the longest row has {width} tokens, less than --seqlen {wish.seqlen}; rows of {width} are used")
    padded = int((~mask).sum())
    if padded:
        notes.append(f"{padded} of {mask.numel()} positions are padding and do not count")
    return TokenRows(tokens=tokens, mask=mask if padded else None, notes=tuple(notes), source=source)
