"""Loading packed and float checkpoints, and what evaluation computes from them."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from conftest import ARCHITECTURES, save_model
from evenround import UserError, quantize
from evenround.checkpoint import Checkpoint
from evenround.data import evaluation_text, tiny_llama
from evenround.evaluate import evaluate, load_model, streamed_loss, text_rows
from evenround.export import EXPORTERS, read_schemes
from evenround.loading import load_tokenizer, open_model, read_config
from evenround.numerics.activations import fake_quantize
from evenround.scheme import PRESETS
from evenround.tasks import run_tasks


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model cut to its first block: the same tokenizer and format, quicker."""
    folder = tmp_path_factory.mktemp("tiny")
    shipped = tiny_llama()
    model, _ = load_model(shipped, torch.bfloat16)
    model.model.layers = model.model.layers[:1]  # type: ignore[union-attr, index]
    model.config.num_hidden_layers = 1  # type: ignore[union-attr]
    model.save_pretrained(folder)  # type: ignore[operator]
    copy_tokenizer(shipped, folder)
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)


def with_vocabulary(config: transformers.PretrainedConfig, size: int) -> transformers.PretrainedConfig:
    return type(config)(**{**config.to_dict(), "vocab_size": size})


@pytest.fixture(scope="module")
def quantized(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    quantize(tiny, folder, scheme="W3A16", recipe="rtn", format="auto_round,llm_compressor,fake", device_map="cpu")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(evaluation_text().read_text()[:3000])
    return path


@pytest.mark.parametrize("form", ["auto_round", "llm_compressor"])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "gpt2", "opt"])
def test_packed_checkpoints_are_multiplied_out(tmp_path: Path, name: str, form: str) -> None:
    if (name, form) == ("gpt2", "llm_compressor"):
        pytest.skip("Conv1D is not for this format")
    save_model(ARCHITECTURES[name], tmp_path / "source")
    quantize(tmp_path / "source", tmp_path / "out", scheme="W4A16G32", sym=False, recipe="rtn", format=f"{form},fake", device_map="cpu")
    packed, tokenizer = load_model(tmp_path / "out" / form)
    plain, _ = load_model(tmp_path / "out" / "fake")
    assert tokenizer is None and not packed.training
    tokens = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(packed(tokens).logits, plain(tokens).logits)
    tied = ARCHITECTURES[name].tie_word_embeddings
    assert (packed.get_output_embeddings().weight is packed.get_input_embeddings().weight) == tied  # type: ignore[operator]


SCHEMES = ["INT8", "INT4", "FP8_STATIC", "FP8_DYNAMIC", "MXFP4", "MXFP8_RCEIL", "NVFP4", "MXINT4"]


@pytest.mark.parametrize(
    ("name", "scheme"), [*(("llama_tied", scheme) for scheme in SCHEMES), ("gemma2", "NVFP4"), ("opt", "FP8_STATIC"), ("opt", "MXFP4")]
)
def test_activations_are_quantized(tmp_path: Path, name: str, scheme: str) -> None:
    """What every format computes, whole and streamed, is what hooks on the plain weights compute."""
    save_model(ARCHITECTURES[name], tmp_path / "source")
    tokens = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(0))
    form = "auto_round" if scheme == "MXINT4" else "llm_compressor"
    quantize(
        tmp_path / "source", tmp_path / "out", scheme=scheme, recipe="rtn", format=f"{form},fake", ignore_layers="layers.1", dataset=tokens,
        seqlen=16, nsamples=4, device_map="cpu",
    )  # fmt: skip
    packed, fake, plain = tmp_path / "out" / form, tmp_path / "out" / "fake", tmp_path / "plain"
    checkpoint, wanted = Checkpoint.open(packed), EXPORTERS[form].stored(PRESETS[scheme]).activation
    stored = read_schemes(read_config(packed), checkpoint.specs, checkpoint.read)
    assert stored and not any("layers.1." in module for module in stored)
    shutil.copytree(fake, plain)
    config = json.loads((plain / "config.json").read_text())
    assert config.pop("quantization_config")["packing_format"] == "auto_round:fake"
    (plain / "config.json").write_text(json.dumps(config))
    model, alone = load_model(packed)[0], load_model(plain)[0]
    with torch.no_grad():
        before = alone(tokens).logits
        for module, weight in stored.items():
            scale = weight.input.scale(checkpoint.read)
            assert (scale is not None) == wanted.calibrated
            alone.get_submodule(module).register_forward_pre_hook(lambda _, args, scale=scale: (fake_quantize(args[0], wanted, scale),))
        expected = alone(tokens).logits
        assert not torch.equal(before, expected)
        for folder in (packed, fake) if "RCEIL" not in scheme else (packed,):  # which this format cannot say
            assert torch.equal(load_model(folder)[0](tokens).logits, expected)
        loss = torch.nn.functional.cross_entropy(model(tokens[:1]).logits[0, :-1], tokens[0, 1:])
    assert streamed_loss(open_model(packed), tokens[:1]) == pytest.approx(float(loss), rel=1e-4)


def test_evaluation_quantizes_activations(tiny: Path, text: Path, tmp_path: Path) -> None:
    quantize(tiny, tmp_path, scheme="INT4", recipe="rtn", format="llm_compressor,fake", device_map="cpu")
    found = {form: evaluate(tmp_path / form, tiny, text, seqlen=64, rows=8) for form in ("llm_compressor", "fake")}
    assert found["llm_compressor"].kl == pytest.approx(found["fake"].kl, rel=0.05)
    quantize(tiny, tmp_path / "alone", scheme="INT4", act_bits=16, recipe="rtn", format="llm_compressor", device_map="cpu")
    alone = evaluate(tmp_path / "alone", tiny, text, seqlen=64, rows=8).kl
    assert alone is not None and found["fake"].kl is not None and found["fake"].kl > 1.2 * alone


def test_a_quantized_head_is_not_tied(tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama_tied"], tmp_path / "source")
    quantize(tmp_path / "source", tmp_path / "out", scheme="W4A16G32", recipe="rtn", quant_lm_head=True, device_map="cpu")
    model, _ = load_model(tmp_path / "out", torch.bfloat16)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight  # type: ignore[union-attr]
    checkpoint = Checkpoint.open(tmp_path / "out")
    stored = read_schemes(read_config(tmp_path / "out"), checkpoint.specs, checkpoint.read)
    assert torch.equal(head, stored["lm_head"].unpack(checkpoint.read).dequantize(torch.bfloat16))  # type: ignore[arg-type]
    assert torch.equal(embedding, checkpoint.read("model.embed_tokens.weight").bfloat16())  # type: ignore[arg-type]


def test_figures(tiny: Path, quantized: Path, text: Path) -> None:
    found = {form: evaluate(quantized / form, tiny, text, seqlen=64, batch_size=3) for form in ("auto_round", "llm_compressor", "fake")}
    packed = found["auto_round"]
    assert packed == found["llm_compressor"]
    assert packed.kl == pytest.approx(found["fake"].kl, rel=0.05)  # fake weights are rounded to bfloat16
    model, original = (load_model(path)[0] for path in (quantized / "auto_round", tiny))
    tokenizer = load_tokenizer(tiny)
    assert tokenizer is not None
    rows, _ = text_rows(text.read_text(), "text", tokenizer, 64, None)
    with torch.no_grad():
        log_q, log_p = (torch.log_softmax(each(rows).logits.double(), -1) for each in (model, original))
    losses = [-each[:, :-1].gather(-1, rows[:, 1:, None]).mean() for each in (log_q, log_p)]
    assert packed.perplexity == pytest.approx(float(losses[0].exp()), rel=1e-5)
    assert packed.reference_perplexity == pytest.approx(float(losses[1].exp()), rel=1e-5)
    assert packed.kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-4)
    assert packed.top1 == pytest.approx(float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()))
    assert packed.tokens == rows.numel() and packed.notes == ()
    assert packed.top1 is not None and 0.5 < packed.top1 < 1
    assert list(packed.to_dict()) == ["perplexity", "reference_perplexity", "kl", "top1", "tokens"]


def test_without_reference_and_few_rows(tiny: Path, text: Path) -> None:
    found = evaluate(tiny, None, text, rows=2, seqlen=32)
    assert (found.reference_perplexity, found.kl, found.top1, found.tokens) == (None, None, None, 64)
    same = evaluate(tiny, tiny, text, rows=2, seqlen=32)
    assert same.kl == 0 and same.top1 == 1 and same.perplexity == same.reference_perplexity == found.perplexity
    assert evaluate(tiny, None, text, rows=1).tokens == 512, "as many tokens as the model takes"


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_logits_in_pieces_are_the_models_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path, text: Path, name: str) -> None:
    model = save_model(with_vocabulary(ARCHITECTURES[name], 2048), tmp_path)
    copy_tokenizer(tiny, tmp_path)
    tokenizer = load_tokenizer(tiny)
    assert tokenizer is not None
    rows, _ = text_rows(text.read_text(), "text", tokenizer, 16, 3)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    monkeypatch.setattr("evenround.evaluate.CHUNK", 2048 * 2 * 5)
    found = evaluate(tmp_path, tmp_path, text, seqlen=16, rows=3, batch_size=2)
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-5) and found.tokens == 48


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_streamed_loss(tmp_path: Path, name: str) -> None:
    model = save_model(ARCHITECTURES[name], tmp_path)
    tokens = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:])
    assert streamed_loss(open_model(tmp_path), tokens) == pytest.approx(float(loss), rel=1e-4)


def test_rows_begin_with_what_the_tokenizer_puts_before_a_text(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    assert tokenizer is not None
    backend = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    first = tokenizer.convert_ids_to_tokens(5)
    backend.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 5)])
    rows, _ = text_rows("one two three four five six seven", "text", tokenizer, 4, None)
    ids = tokenizer("one two three four five six seven", add_special_tokens=False)["input_ids"]
    assert rows[:, 0].tolist() == [5] * len(rows) and rows[:, 1:].flatten().tolist() == ids[: len(ids) // 3 * 3]


def test_short_texts(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("Call me Ishmael.")
    found = evaluate(tiny, None, path, seqlen=64)
    assert "one row of" in found.notes[0] and 2 <= found.tokens < 20
    path.write_text("Call me Ishmael. " * 20)
    assert "asked 50 rows of 16 tokens" in evaluate(tiny, None, path, seqlen=16, rows=50).notes[0]
    path.write_text("a")
    with pytest.raises(UserError, match=r"gives 1 token\(s\), at least 2 are needed"):
        evaluate(tiny, None, path)


def test_texts_that_cannot_be_used(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    for content, message in ((b" \n", "is empty"), (b"\xff\xff", "is not UTF-8"), (None, "cannot be read: No such file")):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            evaluate(tiny, None, path)
    with pytest.raises(UserError, match="is a directory"):
        evaluate(tiny, None, tmp_path)
    for name in ("text.json", "text.JSONL"):
        with pytest.raises(UserError, match=rf"{name} \(--text\) is JSON, and eval reads plain text; extract the text first"):
            evaluate(tiny, None, tmp_path / name)


def test_demo_is_the_shipped_text(tiny: Path) -> None:
    assert evaluate(tiny, None, Path("demo"), seqlen=32, rows=2) == evaluate(tiny, None, evaluation_text(), seqlen=32, rows=2)


def test_directories_that_are_no_checkpoints(tiny: Path, quantized: Path, text: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    for path in (nothing, text):
        for model, reference, flag in ((path, None, ""), (tiny, path, "--reference ")):
            with pytest.raises(UserError, match=f"^{flag}{path} is not a directory; give a checkpoint directory"):
                evaluate(model, reference, text)
    with pytest.raises(
        UserError,
        match=f"is no checkpoint itself; give one of the folders in it: {quantized}/auto_round, {quantized}/fake, {quantized}/llm_",
    ):
        evaluate(quantized, None, text)
    (tmp_path / ".evenround").mkdir()
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "model.safetensors.partial").touch()
    for model, reference in ((tmp_path, None), (tmp_path / "fake", None), (tiny, tmp_path)):
        with pytest.raises(UserError, match="holds an unfinished run; run the command that began it again to finish it"):
            evaluate(model, reference, text)


def test_tokenizers_that_cannot_be_loaded(tiny: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert load_tokenizer(tmp_path) is None
    shutil.copytree(tiny, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    for content, reason in (
        (file.read_text()[:200], "Unterminated string starting at: line"),
        ('{"version": "1.0", "model": {"type": "X"}}', "KeyError: 'added_tokens'"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=f"^the tokenizer in .*model cannot be loaded: {reason}.*; copy the original's tokenizer files"):
            evaluate(tmp_path / "model", None, text)
    file.unlink()
    with pytest.raises(UserError, match="Couldn't instantiate the backend tokenizer .*You need to have sentencepiece"):
        load_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"no such thing")
    with pytest.raises(UserError, match="a .model file needs `pip install sentencepiece protobuf`, or copy a tokenizer.json there"):
        load_tokenizer(tmp_path / "model")
    assert capfd.readouterr() == ("", "")


def test_numbers_that_cannot_be_used(tiny: Path, text: Path) -> None:
    with pytest.raises(UserError, match="--seqlen 1024 is more than the 512 tokens that the model takes; use --seqlen 512"):
        evaluate(tiny, None, text, seqlen=1024)
    with pytest.raises(UserError, match="--seqlen 1 must be at least 2"):
        evaluate(tiny, None, text, seqlen=1)
    with pytest.raises(UserError, match="--rows 0 must be at least 1"):
        evaluate(tiny, None, text, rows=0)
    with pytest.raises(UserError, match="--batch_size 0 must be at least 1"):
        evaluate(tiny, None, text, batch_size=0)


def test_vocabularies(tiny: Path, text: Path, tmp_path: Path) -> None:
    save_model(ARCHITECTURES["llama"], tmp_path / "other")
    with pytest.raises(UserError, match="has 2048 tokens, --reference .* has 128; the reference must be the original"):
        evaluate(tiny, tmp_path / "other", text)
    with pytest.raises(UserError, match="has no tokenizer files; copy"):
        evaluate(tmp_path / "other", None, text)
    copy_tokenizer(tiny, tmp_path / "other")
    with pytest.raises(UserError, match="gives token id [0-9]+, the model has 128 tokens"):
        evaluate(tmp_path / "other", None, text)
    shutil.copytree(tiny, tmp_path / "renamed")
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {f"{token}x" if at == 2000 else token: at for token, at in tokenizer["model"]["vocab"].items()}
    tokenizer["model"]["merges"] = []
    (tmp_path / "renamed" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="the tokenizers of .* differ"):
        evaluate(tiny, tmp_path / "renamed", text)


def test_checkpoints_that_cannot_be_loaded(tiny: Path, quantized: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config.json cannot be read"):
        load_model(tmp_path)
    shutil.copytree(tiny, tmp_path / "float")
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "float" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(UserError, match="has no tensor for model.layers.1"):
        load_model(tmp_path / "float")
    (tmp_path / "float" / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(tmp_path / "float")
    (tmp_path / "float" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(tmp_path / "float")
    packed = shutil.copytree(quantized / "auto_round", tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    for changes, message in (
        ({"num_hidden_layers": 2}, "has no|is missing"),
        ({"intermediate_size": 512}, r"holds a weight \[256, 768\], but config.json makes model.layers.0.mlp.down_proj \[256, 512\]"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' in config.json cannot be read"),
        ({"model_type": "t5", "architectures": ["T5Model"]}, "only causal language models can be loaded"),
    ):
        (packed / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(UserError, match=message):
            load_model(packed)


def test_nan_is_an_error(tiny: Path, text: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(tmp_path)
    copy_tokenizer(tiny, tmp_path)
    with pytest.raises(UserError, match="predicts NaN or infinities on this text; `evenround verify"):
        evaluate(tmp_path, tiny, text, seqlen=16, rows=1)


def test_loading_says_nothing(tiny: Path, quantized: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    load_model(tiny)
    load_model(quantized / "llm_compressor")
    assert capfd.readouterr() == ("", "")
    assert before == (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled())


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task of lm-eval with data of its own: which continuation fits."""
    rows = [{"question": f"Call me {name}", "choices": ["Ishmael", "zzzq xx"], "answer": at % 2} for at, name in enumerate("ABCD")]
    (tmp_path / "data.json").write_text("\n".join(json.dumps(row) for row in rows))
    path = tmp_path / "small.yaml"
    path.write_text(
        "task: small\noutput_type: multiple_choice\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files: {{test: {tmp_path / 'data.json'}}}\n  cache_dir: {tmp_path / 'cache'}\n"
        "test_split: test\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    return path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tasks(quantized: Path, task: Path) -> None:
    pytest.importorskip("lm_eval", reason="an optional extra")
    found = run_tasks(quantized / "auto_round", [str(task)], batch_size=2)
    assert found["small"]["acc,none"] == 0.5
    limited = run_tasks(quantized / "llm_compressor", [str(task)], batch_size=2, limit=1, num_fewshot=0)
    assert limited["small"]["acc,none"] in (0.0, 1.0)
    with pytest.raises(UserError, match="--tasks .*nothing.yaml: there is no such file"):
        run_tasks(quantized / "auto_round", [str(task.with_name("nothing.yaml"))])
    task.write_text(task.read_text().replace("data.json", "nothing.json"))
    with pytest.raises(UserError, match="check the task and that its data can be downloaded or is here"):
        run_tasks(quantized / "auto_round", [str(task)])


def test_tasks_without_lm_eval(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lm_eval", "lm_eval.tasks"):  # the second stays imported after another test
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"--tasks needs lm-eval .*: pip install 'lm-eval>=0.4.13'"):
        run_tasks(tiny, ["piqa"])
