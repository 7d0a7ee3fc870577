import builtins
import json
import logging
import sys
import time
import types
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from evenround import documents
from evenround.calibration import TokenRows, blocks, load_calibration, pack
from evenround.data import calibration_text
from evenround.documents import DatasetSpec, parse_dataset
from evenround.errors import UserError

EOS, BOS, PAD = 0, 1, 2
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}<|eos|>{% endfor %}"
)
TEXT = "".join(f"Line {n} of the ship's log, in the year of {n * 37 % 911}.\n" for n in range(600))


def build(bos: bool = False) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    options = {"special_tokens": ["<|eos|>", "<|bos|>", "<|pad|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    bpe.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, show_progress=False, **options))
    if bos:
        bpe.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    names = {"eos_token": "<|eos|>", "bos_token": "<|bos|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=64, chat_template=TEMPLATE, **names)


TOKENIZER = build()
WITH_BOS = build(bos=True)


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, verbose=False)["input_ids"])


def load(dataset, tokenizer=TOKENIZER, *, nsamples=4, seqlen=16, seed=42, max_length=None, vocab_size=None) -> TokenRows:
    return load_calibration(dataset, tokenizer, nsamples=nsamples, seqlen=seqlen, seed=seed, max_length=max_length, vocab_size=vocab_size)


def refused(dataset, *parts: str, **options) -> str:
    with pytest.raises(UserError) as caught:
        load(dataset, **options)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name: str, content) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    return write


def lines(*values) -> str:
    return "\n".join(json.dumps(value) for value in values)


# --- text files ---


def test_text_file_is_cut_in_consecutive_rows_and_shuffled_by_the_seed(write):
    write("a.txt", TEXT)
    stream = torch.tensor(ids(TEXT))
    every = stream[: len(stream) // 16 * 16].view(-1, 16)
    rows = load("a.txt", nsamples=10_000)
    assert rows.tokens.dtype == torch.int64 and rows.mask is None and rows.source == "a.txt"
    assert sorted(rows.tokens.tolist()) == sorted(every.tolist()) and not torch.equal(rows.tokens, every)
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(42))
    assert torch.equal(rows.tokens, every[order])
    few = load("a.txt", nsamples=5)
    assert torch.equal(few.tokens, every[order[:5]]) and few.notes == ()
    assert few.fingerprint == load(Path("a.txt"), nsamples=5).fingerprint != load("a.txt", nsamples=5, seed=1).fingerprint


def test_the_same_seed_gives_these_rows_everywhere():
    rows = load([[n, n + 1, n + 2] for n in range(3, 20)] + [[4]], nsamples=3, seqlen=2)
    assert rows.tokens.tolist() == [[3, 4], [4, 5], [5, 6]]
    assert torch.randperm(6, generator=torch.Generator().manual_seed(42)).tolist() == [0, 3, 2, 4, 1, 5]
    assert rows.fingerprint == "2a45c1d61d17bcf027965630a33f9e493d92cdea490c77ddd1c55e4c2ef74d47"


def test_fingerprint_sees_shape_tokens_and_mask():
    tokens = torch.arange(12).view(2, 6)
    variants = [(tokens, None), (tokens.view(3, 4), None), (tokens + 1, None), (tokens, tokens > 0), (tokens, tokens > 1)]
    assert len({TokenRows(tokens=t, mask=m, notes=(), source="x").fingerprint for t, m in variants}) == 5


def test_large_text_is_tokenized_in_blocks_without_changing_a_token_and_without_a_warning(write, capsys):
    text = TEXT * 12
    assert len(text) > 200_000
    write("big.txt", "\ufeff" + text.replace("\n", "\r\n"))
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    try:
        rows = load("big.txt", nsamples=100_000)
        load([TEXT])
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    whole = TOKENIZER(text, verbose=False)["input_ids"]
    assert sorted(rows.tokens.tolist()) == sorted(torch.tensor(whole[: len(whole) // 16 * 16]).view(-1, 16).tolist())
    assert heard == [] and capsys.readouterr().err == ""


@settings(deadline=None)
@given(st.text(alphabet="ab \n", max_size=300), st.integers(1, 40))
def test_blocks_lose_nothing_and_stay_small(text, size):
    parts = list(blocks(text, size))
    assert "".join(parts) == text and all(len(part) <= size for part in parts) and all(parts[:-1])


@settings(deadline=None)
@given(st.lists(st.text(alphabet="abc.,1 \n", min_size=1, max_size=12), min_size=5, max_size=30))
def test_blocks_that_end_at_newlines_keep_the_tokens(words):
    text = "\nx".join(words)
    assert [i for part in blocks(text, 80) for i in ids(part)] == ids(text)


def test_only_the_beginning_of_a_text_gets_bos_as_the_tokenizer_says(write):
    write("a.txt", TEXT)
    rows = load("a.txt", WITH_BOS, nsamples=10_000)
    assert int((rows.tokens == BOS).sum()) == 1
    several = load([TEXT[:200]] * 3, WITH_BOS, nsamples=3)
    assert (several.tokens[:, 0] == BOS).all()


def test_few_rows_are_a_note_with_numbers(write):
    write("a.txt", TEXT[:400])
    count = len(ids(TEXT[:400])) // 16
    assert load("a.txt", nsamples=128).notes == (f"asked 128 rows of 16 tokens, a.txt gives {count}",)


def test_seqlen_is_clamped_to_the_model(write):
    write("a.txt", TEXT)
    rows = load("a.txt", seqlen=512, max_length=32)
    assert rows.tokens.shape == (4, 32) and rows.notes == ("--seqlen 512 is more than the model's 32 positions; 32 is used",)
    assert load("a.txt", seqlen=32, max_length=32).notes == ()


def test_text_file_errors(write, tmp_path):
    write("short.txt", "Line 3")
    count = len(ids("Line 3"))
    refused("short.txt", f"'short.txt' holds {count} tokens, less than one row of --seqlen 16; give more text or --seqlen {count} or less")
    assert load("short.txt", seqlen=count).tokens.shape == (1, count)
    write("empty.txt", " \n")
    refused("empty.txt", "--dataset 'empty.txt' is empty (2 B of white space); pass a local .txt")
    write("latin.txt", b"caf\xe9 ")
    refused("latin.txt", "byte 3 is not UTF-8; save the file as UTF-8")
    for code in (0, 7, 11, 27, 31):
        write("binary.txt", b"ab\t\r\f\n" + bytes([code]) * 900)
        refused("binary.txt", f"--dataset 'binary.txt' holds control characters ({chr(code)!r} at character 6): it is no text")
    Path("binary.txt").unlink()
    for name in ("nosuch.jsonl.gz", "nosuch.csv", "data/nosuch.parquet", "nosuch.TXT"):
        refused(name, f"--dataset {name!r}: no such file")
    refused("shrt.txt", "--dataset 'shrt.txt': no such file; did you mean 'short.txt'?")
    refused("nowhere/x.txt", "'nowhere/x.txt': no such file")
    for odd in ("~nobody-here/x.txt", "zero\0byte.txt", "x" * 5000 + ".txt", "short.txt/x.txt"):
        refused(odd, f"{odd!r}: no such file")
    refused(Path("nowhere"), "'nowhere': no such file")
    refused("./nowhere", "'./nowhere': no such file")
    write("table.csv", "a,b")
    refused("table.csv", "'table.csv': .csv is not read; give plain text as .txt, documents as .json or .jsonl")
    write("bare", "a")
    refused("bare", "a file without extension is not read")
    refused(".", "'.' is a directory; give one file: empty.txt, latin.txt, short.txt")
    (tmp_path / "hollow").mkdir()
    refused("hollow", "is a directory; give one file: it holds no .txt, .json or .jsonl")
    refused("short.txt:split=train+test", "a file has no splits; leave out split=train+test")
    refused("short.txt:apply_chat_template", "chat templates need documents; use .json or .jsonl, or leave out the chat options")
    message = "'short.txt' is text, and the model has no tokenizer that can be loaded; put its tokenizer files beside it, or pass token ids"
    refused("short.txt", message, tokenizer=None)
    refused("short.txt", "--nsamples 0 is not a positive number; give 1 or more", nsamples=0)
    refused("short.txt", "--seqlen -1 is not a positive number", seqlen=-1)
    message = "gives token id 3, the model has 3 tokens; use the model's own tokenizer"
    refused(["\u0021" * 9], message.replace("id 3", f"id {max(ids('!' * 9))}"), vocab_size=3, seqlen=1)


def test_unreadable_file(write, monkeypatch):
    write("a.txt", TEXT)

    def deny(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", deny)
    refused("a.txt", "--dataset 'a.txt' cannot be read: Permission denied")


def test_demo_is_the_shipped_text(write):
    rows = load("demo", nsamples=128, seqlen=256)
    assert rows.tokens.shape == (128, 256) and rows.notes == ()
    assert torch.equal(rows.tokens, load(calibration_text(), nsamples=128, seqlen=256).tokens)
    write("demo", "a file of that name does not matter")
    assert load("demo:num=2").notes == ("asked 4 rows of 16 tokens, demo gives 2",)


# --- documents ---

token_lists = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=40), min_size=1, max_size=12)


@settings(deadline=None)
@given(token_lists, st.integers(1, 16), st.booleans())
def test_packing_loses_only_the_tail_and_keeps_the_order(docs, seqlen, concat):
    tensors = [torch.tensor(doc) for doc in docs]
    first, further, tokens = pack(tensors, seqlen, separator=EOS, enough=10_000, concat=concat)
    assert tokens == sum(map(len, docs)) and all(row.shape == (seqlen,) and row.dtype == torch.int64 for row in first + further)
    starts = [doc[:seqlen] for doc in docs if len(doc) >= seqlen and not concat]
    rows = [row.tolist() for row in first]
    for start in starts:  # remove the rows that begin a long document, in order; what stays is the packed stream
        rows.pop(rows.index(start))
    stream = [token for row in rows for token in row]
    ends = docs if concat else [doc[len(doc) // seqlen * seqlen :] for doc in docs]
    expected = [token for end in ends for token in end]
    got = [token for token in stream if token != EOS]
    assert got == expected[: len(got)] and len(stream) % seqlen == 0
    assert len(expected) - len(got) < seqlen
    pieces = [] if concat else [doc[at : at + seqlen] for doc in docs for at in range(seqlen, len(doc) - seqlen + 1, seqlen)]
    assert [row.tolist() for row in further] == pieces


def test_packing_puts_one_separator_between_documents_and_stops_when_there_is_enough():
    docs = [torch.tensor(doc) for doc in ([5, 6], [7, EOS], [8, 9, 10])]
    first, _, _ = pack(docs, 4, separator=EOS, enough=9)
    assert [row.tolist() for row in first] == [[5, 6, EOS, 7], [EOS, 8, 9, 10]]
    assert pack(docs, 4, separator=None, enough=9)[0][0].tolist() == [5, 6, 7, EOS]

    def endless():
        while True:
            yield torch.tensor([4, 4, 4])

    assert len(pack(endless(), 4, separator=EOS, enough=7)[0]) == 7


def test_short_documents_are_packed_and_long_ones_begin_rows(write):
    write("a.jsonl", lines(*[{"text": f"entry {n}"} for n in range(200)]))
    rows = load("a.jsonl")
    assert rows.tokens.shape == (4, 16) and rows.mask is None and (rows.tokens == EOS).any()
    texts = [f"{word} " + TEXT[:300] for word in ("one", "two", "six", "ten")]
    half = min(len(ids(text)) for text in texts) // 2
    begun = load(texts, seqlen=half)
    assert sorted(begun.tokens.tolist()) == sorted(ids(text)[:half] for text in texts)
    more = load(texts, nsamples=6, seqlen=half)  # second pieces only when first ones do not do
    assert more.notes == () and torch.equal(more.tokens[:4], begun.tokens)
    assert all(row in [ids(text)[half : 2 * half] for text in texts] for row in more.tokens[4:].tolist())
    assert torch.equal(more.tokens, load(texts, nsamples=6, seqlen=half).tokens)
    assert not torch.equal(load(texts, nsamples=6, seqlen=half, seed=3).tokens, more.tokens)


def test_json_forms_give_the_same_rows(write):
    texts = [f"{n} {TEXT[n * 40 : n * 40 + 120]}" for n in range(8)]
    expected = load(texts).tokens
    write("strings.json", json.dumps(texts))
    write("texts.jsonl", lines(*[{"text": text, "meta": 1} for text in texts]) + "\n\n")
    write("single.jsonl", lines(*[{"story": text} for text in texts]))
    write("wrapped.json", json.dumps({"train": [{"content": text} for text in texts]}))
    write("columns.json", json.dumps({"text": texts}))
    for name in ("strings.json", "texts.jsonl", "single.jsonl", "wrapped.json", "columns.json"):
        assert torch.equal(load(name).tokens, expected), name
        guess = "the documents are taken from key 'story', the only one; known keys are input_ids, text, messages"
        assert any(guess in note for note in load(name).notes) == (name == "single.jsonl")
    assert load([{"story": text} for text in texts]).notes[0].startswith("dataset: the documents are taken from key 'story'")
    assert load("single.jsonl,texts.jsonl").notes[0].startswith("--dataset 'single.jsonl': the documents are taken from key 'story'")
    assert torch.equal(load([{"text": text} for text in texts]).tokens, expected)
    write("one.json", json.dumps({"text": TEXT, "title": "x"}))
    assert load("one.json").tokens.shape == (4, 16)
    write("surrogate.json", '["half \\ud800 pair, and so on and on and on"]')
    assert load("surrogate.json", nsamples=1).tokens.shape == (1, 16)
    write("concat.jsonl", lines(*texts))
    assert load("concat.jsonl:concat=True", nsamples=99).tokens.shape[0] == (sum(len(ids(text)) for text in texts) + 7) // 16


def test_chats_go_through_the_template(write):
    chat = [{"role": "user", "content": "Line 7?"}, {"role": "assistant", "content": "of the ship"}]
    said = {"conversations": [{"from": "human", "value": "Line 7?"}, {"from": "gpt", "value": "of the ship"}]}
    expected = ids("<user>Line 7?<|eos|><assistant>of the ship<|eos|>")
    write("messages.jsonl", lines({"messages": chat}))
    write("said.json", json.dumps([said]))
    for dataset in ("messages.jsonl", "said.json", [chat], [{"messages": chat}], [said]):
        assert load(dataset, seqlen=len(expected)).tokens.tolist() == [expected]
        assert load(dataset, WITH_BOS, seqlen=len(expected)).tokens.tolist() == [expected]  # the template says what is special
    system = ids("<system>Be, so: brief<|eos|>") + expected
    assert load('messages.jsonl:system_prompt="Be, so: brief"', seqlen=len(system)).tokens.tolist() == [system]
    plain = ids("Line 7?\n\nof the ship")
    assert load("messages.jsonl:apply_chat_template=false", seqlen=len(plain)).tokens.tolist() == [plain]
    write("plain.json", '["Line 7?"]')
    as_user = ids("<user>Line 7?<|eos|>")
    assert load("plain.json:apply_chat_template", seqlen=len(as_user)).tokens.tolist() == [as_user]
    prompted = ids("<system>Hm<|eos|><user>Line 7?<|eos|>")
    assert load("plain.json:system_prompt=Hm", seqlen=len(prompted)).tokens.tolist() == [prompted]
    own = [[{"role": "system", "content": "own"}]]
    write("own.json", json.dumps(own))
    assert load("own.json:system_prompt=Hm", seqlen=5).tokens.tolist()[0] == ids("<system>own<|eos|>")[:5]


def test_document_errors(write):
    write("bad.jsonl", '{"text": "a"}\n\n{"text": }\n')
    refused("bad.jsonl", "--dataset bad.jsonl:3: Expecting value (column 10)")
    write("bad.json", '[\n"a",\n]')
    assert "bad.json:" in refused("bad.json")
    write("lines.json", '{"text": "a"}\n{"text": "b"}')
    refused("lines.json", "lines.json:2: Extra data (column 1); one JSON value a line belongs in a .jsonl file")
    write("keys.jsonl", lines({"text": "a"}, {"q": "a", "p": 1}))
    refused("keys.jsonl", "keys.jsonl:2: keys ['p', 'q'] are not a document; give one of input_ids, text, messages")
    write("number.json", "5")
    refused("number.json", "number.json: int is not a document; give a text, a list of chat messages, or token ids")
    refused(["a", None], "dataset[1]: NoneType is not a document")
    refused([{"text": None}], "dataset[0]: NoneType is not a document")
    refused([{"role": "user", "content": "a"}], "dataset[0] is a chat message of its own; wrap the messages of a chat in a list")
    refused([[{"speaker": "me"}]], "dataset[0]: a chat message has keys ['speaker']; give role and content (or from and value)")
    refused([[{"role": "pirate", "content": "a"}]], "dataset[0]: the chat template refuses the messages (unknown role); mend them or add")
    bare = build()
    bare.chat_template = None
    message = "dataset[0]: the tokenizer has no chat template; give plain text, or join messages with :apply_chat_template=false"
    refused([[{"role": "user", "content": "a"}]], message, tokenizer=bare)
    refused([], "--dataset 'dataset' holds no document with text; pass a local .txt")
    refused(["", " "], "holds no document with text")
    refused(["a"], "holds 1 tokens, less than one row of --seqlen 16; give more text or --seqlen 1 or less")
    refused(["a"], "is text, and the model has no tokenizer", tokenizer=None)
    refused(["a", [3]], "--dataset 'dataset' mixes token ids with text; give one kind")
    refused(iter(["a"]), "dataset of type list_iterator is not read; pass a list (of a data loader: list(loader)), a tensor or a name")


def test_text_that_gives_no_token_at_all():
    words = Tokenizer(models.WordLevel({"a": 0}))
    words.normalizer = normalizers.Replace("zebra", "")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    message = refused(["zebra"], "holds 0 tokens, less than one row of --seqlen 16", tokenizer=tokenizer)
    assert message.endswith("give more text")


# --- token ids ---


def test_token_rows_keep_their_order_and_are_not_shuffled():
    rows = torch.arange(3, 3 + 96).view(6, 16)
    for dataset in (rows, rows.int(), rows.numpy(), list(rows), rows.tolist(), [row.numpy() for row in rows], {"input_ids": rows}):
        loaded = load(dataset)
        assert torch.equal(loaded.tokens, rows[:4]) and loaded.mask is None and loaded.notes == ()
    batches = [{"input_ids": rows[:3], "attention_mask": torch.ones(3, 16)}, {"input_ids": rows[3:], "attention_mask": torch.ones(3, 16)}]
    assert torch.equal(load(batches, nsamples=6).tokens, rows)
    assert torch.equal(load(rows, None).tokens, rows[:4])


def test_ragged_rows_are_padded_and_masked():
    loaded = load([[5, 6, 7], list(range(3, 19)), list(range(3, 23))], nsamples=3)
    assert loaded.tokens.shape == (3, 16) and loaded.mask is not None
    assert loaded.mask.sum(1).tolist() == [3, 16, 16] and loaded.mask[0, :3].all() and loaded.tokens[0, :3].tolist() == [5, 6, 7]
    assert loaded.notes == (
        "1 of 3 rows are longer than --seqlen 16 and were cut",
        "13 of 48 positions are padding and do not count",
    )


def test_rows_shorter_than_seqlen_make_a_narrower_table():
    loaded = load(torch.full((4, 8), 5), seqlen=2048)
    assert loaded.tokens.shape == (4, 8) and loaded.mask is None
    assert loaded.notes == ("the longest row has 8 tokens, less than --seqlen 2048; rows of 8 are used",)


def test_padding_on_either_side_is_moved_to_the_end():
    right = {"input_ids": [5, 6, PAD, PAD], "attention_mask": [1, 1, 0, 0]}
    left = {"input_ids": [9, 9, 5, 6], "attention_mask": [0, 0, 1, 1]}
    whole = {"input_ids": [3, 4, 5, 6]}
    loaded = load([right, left, whole], nsamples=3, seqlen=4)
    assert loaded.tokens[:, :2].tolist() == [[5, 6], [5, 6], [3, 4]]
    assert loaded.mask.tolist() == [[True, True, False, False]] * 2 + [[True] * 4]
    bare = load(torch.tensor([[5, 6, PAD, PAD], [3, 4, 5, 6]]), nsamples=2, seqlen=4)
    assert bare.mask.tolist() == [[True, True, False, False], [True] * 4]
    same = build()
    same.pad_token = same.eos_token
    kept = load(torch.tensor([[5, EOS, EOS, EOS], [3, 4, 5, EOS]]), same, nsamples=2, seqlen=4)
    assert kept.mask.tolist() == [[True, True, False, False], [True] * 4]


def test_token_errors():
    refused([[3, 4], [3, 400]], "dataset[1]: token id 400 is outside the vocabulary of 400; is it from this model's tokenizer?")
    refused([[3, -100]], "dataset[0]: token id -100 is outside the vocabulary of 400")
    refused([[3, -100]], "dataset[0]: token id -100 is outside the vocabulary; is it", tokenizer=None)
    refused([[3, 9]], "dataset[0]: token id 9 is outside the vocabulary of 9", vocab_size=9)
    assert load([[3, 450]], vocab_size=451).tokens.tolist() == [[3, 450]]
    refused([[PAD, PAD]], "dataset[0]: a row has no tokens but padding; leave it out")
    refused([{"input_ids": [3, 4], "attention_mask": [0, 0]}], "a row has no tokens but padding")
    refused(torch.zeros(2, 4), "dataset: token ids are torch.float32 [2, 4]; give integers [seqlen] or [rows, seqlen]")
    refused(torch.zeros(1, 2, 4).long(), "token ids are torch.int64 [1, 2, 4]")
    refused([{"input_ids": [3, 4], "attention_mask": [1]}], "dataset[0]: token ids are torch.int64 [2] with mask [1]")
    refused({"input_ids": [[3, 4], [5]]}, "dataset: the token ids or the mask are not a rectangle of integers")
    refused(torch.zeros(0, 4).long(), "dataset has no token ids; leave it out")


# --- grammar ---


def test_grammar(write):
    assert parse_dataset("a/b") == (DatasetSpec(name="a/b"),)
    text = 'x/y:split=train+test:num=12:concat=True:apply_chat_template:system_prompt="a, b: c",z/w:apply_chat_template=False'
    assert parse_dataset(text) == (
        DatasetSpec(name="x/y", split=("train", "test"), num=12, concat=True, apply_chat_template=True, system_prompt="a, b: c"),
        DatasetSpec(name="z/w", apply_chat_template=False),
    )
    assert parse_dataset("pile-10k")[0].name == "NeelNanda/pile-10k"
    assert parse_dataset("C:\\texts\\a.txt:num=3") == (DatasetSpec(name="C:\\texts\\a.txt", num=3),)
    write("one, two.txt", TEXT)
    write("half: past.txt", TEXT)
    write("a=b:c/x.txt", TEXT)
    assert parse_dataset("one, two.txt") == (DatasetSpec(name="one, two.txt"),)
    assert parse_dataset("p/q,one, two.txt:num=2,half: past.txt:concat,a=b:c/x.txt") == (
        DatasetSpec(name="p/q"),
        DatasetSpec(name="one, two.txt", num=2),
        DatasetSpec(name="half: past.txt", concat=True),
        DatasetSpec(name="a=b:c/x.txt"),
    )
    assert load("one, two.txt:num=2,half: past.txt").tokens.shape == (4, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a/b:splt=train", "--dataset 'a/b': unknown key 'splt'; did you mean 'split'? (known: split, num, concat, apply_chat"),
        ("a/b:train", "unknown key 'train'"),
        ("a/b:num=many", "'a/b': num='many' is not a positive number of rows"),
        ("a/b:num=0", "num='0' is not a positive number"),
        ("a/b:num=", "'a/b': num has no value; write num=…"),
        ("a/b:split", "split has no value"),
        ("a/b:concat=maybe", "'a/b': concat='maybe' is neither true nor false"),
        ("a/b,,c/d", "--dataset has an empty name in ''; pass a local .txt"),
        ("", "--dataset has an empty name"),
        ('a/b:system_prompt="x', 'has an unmatched double quote; write system_prompt="…"'),
    ],
)
def test_grammar_errors(text, message):
    refused(text, message)


def test_mixture_shares_rows_and_fills_gaps(write):
    write("a.txt", "a " * 4000)
    write("b.txt", "b " * 4000)
    write("c.txt", "c " * 40)
    single = {name: ids(f"{name} {name} ")[2] for name in "abc"}

    def counts(dataset: str) -> list[int]:
        rows = load(dataset, nsamples=30)
        return [sum(single[name] in row for row in rows.tokens.tolist()) for name in "abc"]

    assert counts("a.txt,b.txt") == [15, 15, 0]
    assert counts("a.txt:num=5,b.txt") == [5, 25, 0]
    few = counts("c.txt,a.txt,b.txt")
    assert few[2] < 10 and abs(few[0] - few[1]) <= 1 and sum(few) == 30
    assert counts("a.txt:num=4,b.txt:num=6") == [4, 6, 0]
    assert sum(counts("a.txt:num=40,b.txt:num=40")) == 30
    rows = load("a.txt,b.txt", nsamples=30)
    assert rows.source == "a.txt,b.txt" and len({tuple(row) for row in rows.tokens[:15].tolist()}) > 1


# --- the hub ---


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds one dataset of three splits, and says what was asked of it."""
    rows = [{"text": f"{n} {TEXT[n * 50 : n * 50 + 200]}"} for n in range(20)]
    table = {"validation": rows[:1], "train": rows, "test": rows[:3]}
    asked: dict[str, object] = {"siblings": [types.SimpleNamespace(size=10), types.SimpleNamespace(size=None)]}

    def dataset_info(self, name, *, files_metadata, timeout):
        asked["timeout"] = timeout
        answer = asked.get("answer")
        if isinstance(answer, Exception):
            raise answer
        return types.SimpleNamespace(siblings=asked["siblings"])

    def load_dataset(name, *, streaming):
        asked["name"], asked["streaming"] = name, streaming
        if "load" in asked:
            raise asked["load"]
        return asked.get("table", table)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_hub_dataset(hub, monkeypatch):
    assert load(None).tokens.shape == (4, 16)
    assert hub["name"] == "NeelNanda/pile-10k" and hub["streaming"] is False and hub["timeout"] == documents.HUB_DEADLINE
    hub["siblings"] = [types.SimpleNamespace(size=5 << 30)]
    assert load("some/set:split=train+test").tokens.shape == (4, 16) and hub["streaming"] is True
    monkeypatch.setattr(documents, "HUB_DOCUMENTS", 1)
    assert "gives" in load("some/set", nsamples=100).notes[0]
    hub["answer"] = OfflineModeIsEnabled("offline")
    assert load("some/set", nsamples=1).tokens.shape == (1, 16) and hub["streaming"] is False
    hub["table"] = {"other": [{"text": TEXT}]}
    assert load("some/set").tokens.shape == (4, 16)


def test_hub_errors(hub, monkeypatch):
    refused("some/set:split=tests", "--dataset 'some/set' has no split 'tests'; did you mean 'test'? (it has validation, train, test)")
    hub["load"] = ValueError("Config name is missing")
    refused("some/set", "--dataset 'some/set' cannot be loaded: Config name is missing; pass a local .txt, .json or .jsonl file")
    del hub["load"]
    hub["table"] = {"train": [{"q": 1, "a": 2}]}
    refused("some/set", "some/set:train[0]: keys ['a', 'q'] are not a document")
    hub["answer"] = RepositoryNotFoundError("404", response=types.SimpleNamespace(headers={}, request=None))
    refused("dmo", "--dataset 'dmo' is neither a file nor a hub dataset that you may read; did you mean 'demo'?; or pass a local .txt")
    hub["answer"] = None
    true_import = builtins.__import__

    def without(name, *args, **options):
        if name == "datasets":
            raise ImportError(name)
        return true_import(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    refused("some/set", "--dataset 'some/set' needs the package 'datasets' (pip install datasets); or pass a local .txt")


def test_no_network_fails_at_once(hub, monkeypatch):
    hub["answer"] = OSError("Name or service not known")
    start = time.monotonic()
    refused(
        None,
        "--dataset 'NeelNanda/pile-10k' is no file, and the hub cannot be reached (Name or service not known); pass a local .txt, .json or "
        ".jsonl file (--dataset FILE), or --dataset demo for the text that ships with the package; if it is in the hub's cache, "
        "set HF_HUB_OFFLINE=1",
    )
    assert time.monotonic() - start < 1
    monkeypatch.setattr(documents, "HUB_DEADLINE", 0.05)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, **options: time.sleep(1))
    refused(None, "the hub cannot be reached (no answer in 0 s)")
    assert time.monotonic() - start < 1.5
