"""Checkpoints: round trips with the safetensors library, hostile files, full disks, killed writers."""

import errno
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import evenround.tensorfile as tensorfile
from evenround.checkpoint import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    CheckpointWriter,
    TensorSpec,
    atomic_write_bytes,
    atomic_write_text,
    parse_size,
    remove_checkpoint,
)
from evenround.errors import UserError

TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 4), max_size=4).map(tuple)),
    min_size=1,
    max_size=8,
)


def random_tensor(spec: TensorSpec, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if spec.dtype == torch.bool else 256
    data = torch.randint(0, high, (spec.nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(spec.dtype).reshape(spec.shape)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes (NaNs included)."""
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(flat[0], flat[1])


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write_all(directory: Path, tensors: Mapping[str, Tensor], max_shard_size: int = 10**9) -> CheckpointWriter:
    writer = CheckpointWriter(directory, specs_of(tensors), max_shard_size)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish(tensors)
    return writer


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "embed": torch.randn(10, 8, generator=generator).to(torch.bfloat16),
        "a.codes": torch.randint(0, 255, (3, 5), dtype=torch.uint8, generator=generator),
        "a.scale": torch.randn(3, 2, generator=generator).half(),
        "norm": torch.randn(8, generator=generator),
        "step": torch.tensor(7),
        "none": torch.empty(0, 4),
    }


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header, given as bytes or as what JSON can hold."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# ------------------------------------------------------------------------------------------------------------ round trips


@settings(max_examples=40, deadline=None)
@given(tensors=TENSORS, max_shard_size=st.sampled_from([1, 40, 10**6]))
def test_the_library_reads_ours(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], max_shard_size: int) -> None:
    data = {name: random_tensor(TensorSpec(*spec), seed) for seed, (name, spec) in enumerate(tensors.items())}
    with tempfile.TemporaryDirectory() as temporary:
        writer = write_all(Path(temporary), data, max_shard_size)
        theirs: dict[str, Tensor] = {}
        for shard in writer.shards:
            theirs |= load_file(Path(temporary) / shard.name)
            with safe_open(Path(temporary) / shard.name, "pt") as file:
                assert file.metadata() == {"format": "pt"}
        assert theirs.keys() == data.keys() and all(same(theirs[name], data[name]) for name in data)
        ours = Checkpoint.open(Path(temporary))
        assert dict(ours.specs) == specs_of(data) and all(same(ours.read(name), data[name]) for name in data)
        assert writer.total_bytes == sum(path.stat().st_size for path in Path(temporary).iterdir())


@settings(max_examples=40, deadline=None)
@given(tensors=TENSORS)
def test_we_read_the_librarys(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    data = {name: random_tensor(TensorSpec(*spec), seed) for seed, (name, spec) in enumerate(tensors.items())}
    with tempfile.TemporaryDirectory() as temporary:
        save_file(data, Path(temporary) / SINGLE_FILE)
        ours = Checkpoint.open(Path(temporary))
        assert dict(ours.specs) == specs_of(data) and all(same(ours.read(name), data[name]) for name in data)
        assert ours.nbytes == sum(tensor.nbytes for tensor in data.values())


def test_a_sharded_checkpoint_has_an_index(tmp_path: Path) -> None:
    data = some_tensors()
    writer = write_all(tmp_path, data, 170)
    names = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    assert [shard.name for shard in writer.shards] == names
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in data.values())}
    ours = Checkpoint.open(tmp_path)
    assert index["weight_map"] == {name: ours.shard_of(name) for name in data}
    assert set(index["weight_map"].values()) == set(names)
    assert all(same(ours.read(name), data[name]) for name in data)


def test_shard_plan() -> None:
    byte = {name: TensorSpec(torch.uint8, (size,)) for name, size in {"a": 3, "b": 3, "huge": 50, "c": 4, "d": 6}.items()}
    plan = CheckpointWriter.shard_plan(byte, 10)
    assert [list(shard.offsets) for shard in plan] == [["a", "b"], ["huge"], ["c", "d"]]
    mixed = {"u8": TensorSpec(torch.uint8, (3,)), "f32": TensorSpec(torch.float32, (1,)), "f16": TensorSpec(torch.float16, (1,))}
    (shard,) = CheckpointWriter.shard_plan(mixed, 100)
    assert list(shard.offsets) == ["f32", "f16", "u8"] and len(shard.header) % 8 == 0
    assert shard.offsets["f32"] == len(shard.header) and shard.size == len(shard.header) + 9
    for specs, size in (({}, 1), (mixed, 0), ({"__metadata__": TensorSpec(torch.uint8, (1,))}, 1)):
        with pytest.raises(ValueError, match=r"tensors in shards of|__metadata__"):
            CheckpointWriter.shard_plan(specs, size)
    with pytest.raises(ValueError, match="dtype torch.complex64, which safetensors cannot hold"):
        CheckpointWriter.shard_plan({"x": TensorSpec(torch.complex64, (1,))}, 1)


def test_strided_views_and_parameters_are_written_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    write_all(tmp_path, {"t": base.T, "slice": base[:, ::2], "p": torch.nn.Parameter(base)})
    ours = Checkpoint.open(tmp_path)
    assert torch.equal(ours.read("t"), base.T) and torch.equal(ours.read("slice"), base[:, ::2]) and torch.equal(ours.read("p"), base)


def test_rows(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 3, 2)
    write_all(tmp_path, {"x": base, "scalar": torch.tensor(1.0)})
    ours = Checkpoint.open(tmp_path)
    assert torch.equal(ours.read_rows("x", 1, 3), base[1:3]) and ours.read_rows("x", 4, 4).shape == (0, 3, 2)
    for name, start, stop in (("x", 3, 5), ("x", 2, 1), ("x", -1, 1), ("scalar", 0, 0)):
        with pytest.raises(ValueError, match=f"rows {start} to {stop} of '{name}'"):
            ours.read_rows(name, start, stop)


PEAK = """
import sys
from pathlib import Path
from evenround.checkpoint import Checkpoint

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

ours = Checkpoint.open(Path(sys.argv[1]))
ours.read(ours.names[0])
before = peak()
if sys.argv[2] == "keep":
    kept = [ours.read(name) for name in ours.names]
else:
    for name in ours.names:
        ours.read(name)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_reading_leaves_no_resident_memory(tmp_path: Path) -> None:
    """Reading 12 tensors of 8 MiB in turn never takes more than two of them; keeping them takes all (so the measure works).

    Each in a process of its own: a peak cannot be set back on every kernel, and what other tests left would count.
    """
    write_all(tmp_path, {str(i): torch.full((2**23,), i, dtype=torch.uint8) for i in range(12)}, 30 * 2**20)

    def growth(what: str) -> int:
        return int(subprocess.run([sys.executable, "-c", PEAK, tmp_path, what], check=True, capture_output=True, env=source_env()).stdout)

    assert growth("drop") < 20 * 2**20
    assert growth("keep") > 60 * 2**20


def test_a_long_read_goes_on_after_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = some_tensors()
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, part, offset: pwrite(file, part[:5], offset))
    write_all(tmp_path, data)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:7]], offset))
    ours = Checkpoint.open(tmp_path)
    assert all(same(ours.read(name), data[name]) for name in data)


def test_fingerprint(tmp_path: Path) -> None:
    data = some_tensors() | {"big": torch.zeros(100_000)}
    write_all(tmp_path / "a", data, 300)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "b").iterdir():
        os.utime(path, (1, 1))
    print_a = Checkpoint.open(tmp_path / "a").fingerprint()
    assert print_a == Checkpoint.open(tmp_path / "b").fingerprint() and len(print_a) == 64
    data["norm"][0] += 1
    write_all(tmp_path / "c", data, 300)
    write_all(tmp_path / "d", data | {"norm": data["norm"].view(torch.int32)}, 300)
    assert len({print_a, *(Checkpoint.open(tmp_path / name).fingerprint() for name in "cd")}) == 3


def test_fingerprint_sees_a_tensor_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """A model tuned further keeps its embeddings and norms, and with them the beginning and the end of its files."""
    data = {"a": torch.zeros(100_000), "b": torch.zeros(100), "c": torch.zeros(100_000)}
    write_all(tmp_path / "before", data, 10**9)
    write_all(tmp_path / "after", data | {"b": torch.ones(100)}, 10**9)
    assert Checkpoint.open(tmp_path / "before").fingerprint() != Checkpoint.open(tmp_path / "after").fingerprint()


# ---------------------------------------------------------------------------------------------------------- hostile files


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", r"its JSON cannot be read \(Expecting.*download the file again"),
        (b"\xff\xfe", b"", r"its JSON cannot be read \('utf-8' codec"),
        (b"[" * 200_000, b"", r"its JSON cannot be read \("),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", r"its JSON cannot be read \(Exceeds"),
        (b"[1]", b"", r"its JSON is a list, an object is needed"),
        (b'{"a": 1, "b": 2, "a": 3}', b"", r"key 'a' occurs twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', b"", r"key 'dtype' occurs twice"),
        ({"__metadata__": {"a": 1}}, b"", r"__metadata__ in its header must hold strings only"),
        ({"__metadata__": []}, b"", r"__metadata__ in its header must hold strings only"),
        ({"\ud800": entry()}, bytes(8), r"tensor '\\ud800' has a name that is not valid Unicode"),
        ({"a": 5}, b"", r"tensor 'a' must have dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), r"tensor 'a' must have dtype, shape and data_offsets"),
        ({"a": entry("F4")}, bytes(8), r"tensor 'a' has dtype 'F4', which is not known here; known: F64, F32"),
        ({"a": entry([])}, bytes(8), r"tensor 'a' has dtype \[\]"),
        ({"a": entry(shape=[-2])}, bytes(8), r"tensor 'a' has shape \[-2\], which no tensor can have"),
        ({"a": entry(shape=[2.0])}, bytes(8), r"shape \[2.0\], which no tensor"),
        ({"a": entry(shape=[True])}, bytes(8), r"shape \[True\], which no tensor"),
        ({"a": entry(shape="2")}, bytes(8), r"shape '2', which no tensor"),
        ({"a": entry(shape=[1] * 65)}, bytes(8), r"shape \[1, 1.*\.\.\.\], which no tensor"),
        ({"a": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}, b"", r"shape \[1099511627776, 1099511627776, 0\], which no tensor"),
        ({"a": entry(offsets=[0])}, bytes(8), r"data_offsets \[0\]; two whole numbers are needed"),
        ({"a": entry(offsets=[-8, 0])}, bytes(8), r"data_offsets \[-8, 0\]; two whole"),
        ({"a": entry(offsets={"0": 1})}, bytes(8), r"data_offsets {'0': 1}; two whole"),
        ({"a": entry(offsets=[8, 0])}, bytes(8), r"'a' is F32 \[2\], 8 bytes, but its data_offsets \[8, 0\] span -8"),
        ({"a": entry(shape=[3])}, bytes(8), r"'a' is F32 \[3\], 12 bytes, but its data_offsets \[0, 8\] span 8"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), r"'a' and 'b' overlap \(data offset 4, expected 8\)"),
        ({"a": entry(), "b": entry()}, bytes(16), r"'a' and 'b' overlap"),
        ({"a": entry(), "b": entry(offsets=[16, 24])}, bytes(24), r"'a' and 'b' have a hole between them \(data offset 16, expected 8\)"),
        ({"a": entry(offsets=[8, 16])}, bytes(16), r"the start of the data and 'a' have a hole"),
        ({"a": entry()}, bytes(7), r"is cut short: expected \d+ bytes, it has \d+; download it again"),
        ({"a": entry()}, bytes(9), r"has bytes after its last tensor: expected \d+ bytes, it has \d+"),
        ({"n" * 10**6: entry("F4")}, bytes(8), r"tensor 'nnn.*\.\.\.n+' has dtype"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    path = raw_file(tmp_path / SINGLE_FILE, header, data)
    with pytest.raises(UserError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


def test_header_lengths(tmp_path: Path) -> None:
    path = raw_file(tmp_path / SINGLE_FILE, {"a": entry()}, bytes(8), length=2**63)
    with pytest.raises(UserError, match=r"model.safetensors: its header claims 9223372036854775808 bytes; the file has \d+.*download it"):
        Checkpoint.open(tmp_path)
    raw_file(path, {}, bytes(8), length=11)
    with pytest.raises(UserError, match="its header claims 11 bytes; the file has 18"):
        Checkpoint.open(tmp_path)
    path.write_bytes(struct.pack("<Q", 100_000_001))
    os.truncate(path, 200_000_000)
    with pytest.raises(UserError, match="header claims 100000001 bytes; .* at most 100000000"):
        Checkpoint.open(tmp_path)
    path.write_bytes(b"1234567")
    with pytest.raises(UserError, match="has 7 bytes, too few for a safetensors file"):
        Checkpoint.open(tmp_path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match="is a Git LFS pointer, not the weights; run `git lfs pull` in "):
        Checkpoint.open(tmp_path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_files_are_refused_or_read_within_bounds(data: st.DataObject) -> None:
    """Whatever bytes change, opening either raises a UserError or gives a checkpoint every tensor of which can be read."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / SINGLE_FILE
        save_file(some_tensors(), path)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 200))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 1, len(content) // 2]))])
        try:
            ours = Checkpoint.open(Path(temporary))
        except UserError:
            return
        for name in ours.names:
            assert ours.read(name).nbytes == ours.specs[name].nbytes


def test_a_tiny_header_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    raw_file(tmp_path / SINGLE_FILE, {"a": entry("F64", [2**50], [0, 2**53])}, bytes(8))
    with pytest.raises(UserError, match="is cut short: expected 9007199254741"):
        Checkpoint.open(tmp_path)


def test_many_repeated_keys_are_found_at_once(tmp_path: Path) -> None:
    keys = ",".join(f'"{i}":1' for i in range(300_000)) + ',"299999":1'
    raw_file(tmp_path / SINGLE_FILE, ("{" + keys + "}").encode())
    with pytest.raises(UserError, match="key '299999' occurs twice"):
        Checkpoint.open(tmp_path)


def test_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE_FILE)
    with pytest.raises(UserError, match="model.safetensors is not a regular file"):
        Checkpoint.open(tmp_path)


def test_a_link_without_a_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).symlink_to("../blobs/gone")
    with pytest.raises(UserError, match="model.safetensors cannot be read: No such file or directory; check the path"):
        Checkpoint.open(tmp_path)


def test_no_permission_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path, some_tensors())
    ours = Checkpoint.open(tmp_path)
    monkeypatch.setattr(os, "open", failing(errno.EACCES))
    with pytest.raises(UserError, match="model.safetensors cannot be read: Permission denied; check the path, its permissions"):
        ours.read("norm")


def test_a_file_cut_after_opening(tmp_path: Path) -> None:
    write_all(tmp_path, some_tensors())
    ours = Checkpoint.open(tmp_path)
    os.truncate(tmp_path / SINGLE_FILE, 200)
    with pytest.raises(UserError, match=r"model.safetensors ended at byte \d+: it became shorter since it was opened"):
        for name in ours.names:
            ours.read(name)


def test_unknown_tensor(tmp_path: Path) -> None:
    write_all(tmp_path, some_tensors())
    ours = Checkpoint.open(tmp_path)
    for ask in (ours.read, ours.shard_of):
        with pytest.raises(UserError, match="holds no tensor 'a.scales'; did you mean 'a.scale'?"):
            ask("a.scales")


# --------------------------------------------------------------------------------------------------------------- indices


def sharded(directory: Path, change: Callable[[dict[str, object]], None] = lambda index: None) -> Path:
    write_all(directory, some_tensors(), 170)
    index = json.loads((directory / INDEX_FILE).read_text())
    change(index)
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return directory


FIRST, SECOND = (f"model-{i:05d}-of-00002.safetensors" for i in (1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("weight_map"), r"weight_map must map tensor names to files"),
        (lambda index: index.update(weight_map={}), r"weight_map must map tensor names to files"),
        (lambda index: index.update(weight_map={"a": 1}), r"weight_map must map tensor names to files"),
        (lambda index: index["weight_map"].update(x=FIRST), r"-00001-of-00002.safetensors does not hold tensor 'x', though .* says so; "),
        (lambda index: index["weight_map"].update(x="other.safetensors"), r"other.safetensors is missing, .*json names it; download it"),
        (lambda index: index["weight_map"].update(x="../m.safetensors"), r"json names '../m.safetensors'; only .safetensors files beside"),
        (lambda index: index["weight_map"].update(x="/m.safetensors"), r"only .safetensors files beside it"),
        (lambda index: index["weight_map"].update(x="a\0.safetensors"), r"only .safetensors files beside it"),
        (lambda index: index["weight_map"].update(x="pytorch_model.bin"), r"only .safetensors files beside it"),
        (lambda index: index["weight_map"].update(x="a" * 300 + ".safetensors"), r"cannot be read: File name too long"),
        (lambda index: index["weight_map"].pop("norm"), r"-00002-of-00002.safetensors holds tensors that .* does not place there: 'norm';"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, change: Callable[[dict[str, object]], None], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Checkpoint.open(sharded(tmp_path, change))


def test_missing_truncated_and_doubled_shards(tmp_path: Path) -> None:
    (sharded(tmp_path / "a") / SECOND).unlink()
    with pytest.raises(UserError, match=f"{SECOND} is missing, {INDEX_FILE} names it; download it, then run again"):
        Checkpoint.open(tmp_path / "a")
    size = (sharded(tmp_path / "b") / SECOND).stat().st_size
    os.truncate(tmp_path / "b" / SECOND, size - 10)
    with pytest.raises(UserError, match=f"{SECOND} is cut short: expected {size} bytes, it has {size - 10}; download it again"):
        Checkpoint.open(tmp_path / "b")
    save_file({f"t{i}": torch.zeros(1) for i in range(8)} | load_file(sharded(tmp_path / "c") / FIRST), tmp_path / "c" / FIRST)
    with pytest.raises(UserError, match=r"place there: 't0', 't1', 't2', 't3', 't4' and 3 more; download both again"):
        Checkpoint.open(tmp_path / "c")


def test_an_index_of_other_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(UserError, match="index.json: key 'a' occurs twice"):
        Checkpoint.open(tmp_path)
    os.truncate(tmp_path / INDEX_FILE, 100_000_001)
    with pytest.raises(UserError, match="has 100000001 bytes; an index has at most 100000000"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"holds no checkpoint \(model.safetensors or model.safetensors.index.json\); pass a directory that does"),
        (["config.json"], r"holds no checkpoint"),
        (["pytorch_model.bin"], r"holds pytorch_model.bin, a pickle, not read here; convert it: `python -c .*save_pretrained\('NEW_DIR'\)"),
        (["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"], r"holds pytorch_model-00001-of-00002.bin, a pickle"),
        (["q4.gguf", "config.json"], r"holds q4.gguf, GGUF, not read here; .*g = 'q4.gguf'; .*gguf_file=g\)"),
        (["adapter_config.json", "adapter_model.safetensors"], r"holds an adapter, not a model; merge it .*merge_and_unload\(\)"),
        (["model.safetensors.partial"], r"holds an unfinished checkpoint \(.partial files\); run the command that began it again"),
        ([FIRST], rf"holds {FIRST}, but neither model.safetensors nor model.safetensors.index.json; download the missing file"),
    ],
)
def test_advice(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path) in str(caught.value)
    if "python -c" in str(caught.value):
        compile(str(caught.value).split('"')[1], "advice", "exec")


def test_advice_for_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist; pass a directory with config.json and model.safetensors"):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="model.gguf is a file; pass the directory that holds"):
        Checkpoint.open(tmp_path / "model.gguf")


# ---------------------------------------------------------------------------------------------------------------- writing


def failing(code: int) -> Callable[..., object]:
    def fail(*_: object) -> object:
        raise OSError(code, os.strerror(code))

    return fail


def source_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(tensorfile.__file__).parent.parent)}


@pytest.mark.parametrize("max_shard_size", [170, 10**9])
def test_equal_input_gives_equal_bytes(tmp_path: Path, max_shard_size: int) -> None:
    data = some_tensors()
    write_all(tmp_path / "a", data, max_shard_size)
    writer = CheckpointWriter(tmp_path / "b", specs_of(data), max_shard_size)
    for name in [*reversed(data), "norm"]:
        writer.write(name, data[name])
    writer.flush()
    writer.finish(list(data))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_nothing_can_be_opened_before_the_end(tmp_path: Path) -> None:
    data = some_tensors()
    writer = CheckpointWriter(tmp_path, specs_of(data), 170)
    assert sorted(files_of(tmp_path)) == [FIRST + ".partial", SECOND + ".partial"]
    assert writer.total_bytes > sum(path.stat().st_size for path in tmp_path.iterdir())
    assert writer.fresh == data.keys()
    with pytest.raises(UserError, match="holds an unfinished checkpoint"):
        Checkpoint.open(tmp_path)
    for name in data:
        writer.write(name, data[name])
    with pytest.raises(ValueError, match=r"not complete: missing \['embed'\], unknown \['x'\]"):
        writer.finish([*(name for name in data if name != "embed"), "x"])
    writer.finish(data)
    assert sorted(files_of(tmp_path)) == [FIRST, SECOND, INDEX_FILE]


def test_the_writer_checks_what_it_is_given(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, {"a": TensorSpec(torch.float32, (2,))}, 100)
    for name, tensor in (("b", torch.zeros(2)), ("a", torch.zeros(3)), ("a", torch.zeros(2, dtype=torch.float16))):
        with pytest.raises(ValueError, match=rf"tensor '{name}': planned .*, given TensorSpec\(dtype={tensor.dtype}"):
            writer.write(name, tensor)


@pytest.mark.parametrize("max_shard_size", [170, 10**9])
def test_another_writer_goes_on(tmp_path: Path, max_shard_size: int) -> None:
    data = some_tensors()
    names = list(data)
    write_all(tmp_path / "whole", data, max_shard_size)
    first = CheckpointWriter(tmp_path / "parts", specs_of(data), max_shard_size)
    for name in names[:3]:
        first.write(name, data[name])
    first.flush()
    (tmp_path / "parts" / "model.safetensors.partial.new").write_bytes(b"left by a kill")
    second = CheckpointWriter(tmp_path / "parts", specs_of(data), max_shard_size)
    assert second.fresh == frozenset()
    for name in names[3:]:
        second.write(name, data[name])
    second.finish(names)
    (tmp_path / "parts" / "model.safetensors.partial.new").unlink(missing_ok=True)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


def test_a_kill_between_renames(tmp_path: Path) -> None:
    data = some_tensors()
    write_all(tmp_path / "whole", data, 170)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    (tmp_path / "parts" / INDEX_FILE).unlink()
    (tmp_path / "parts" / SECOND).rename(tmp_path / "parts" / (SECOND + ".partial"))
    CheckpointWriter(tmp_path / "parts", specs_of(data), 170).finish(data)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")
    CheckpointWriter(tmp_path / "parts", specs_of(data), 170).finish(data)  # all done: nothing to do
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


def test_an_index_over_unfinished_files_goes(tmp_path: Path) -> None:
    data = some_tensors()
    write_all(tmp_path, data, 170)
    (tmp_path / SECOND).rename(tmp_path / (SECOND + ".partial"))
    CheckpointWriter(tmp_path, specs_of(data), 170)
    assert sorted(files_of(tmp_path)) == [FIRST, SECOND + ".partial"]


def test_writing_into_a_finished_checkpoint_reopens_it(tmp_path: Path) -> None:
    data = some_tensors()
    write_all(tmp_path, data, 170)
    writer = CheckpointWriter(tmp_path, specs_of(data), 170)
    writer.write("embed", data["embed"] + 1)
    assert sorted(files_of(tmp_path)) == [FIRST + ".partial", SECOND]
    writer.finish(data)
    assert torch.equal(Checkpoint.open(tmp_path).read("embed"), data["embed"] + 1)


def test_killed_and_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that kill themselves at their n-th write, sync or rename leave directories in which a rerun gives the same bytes."""
    code = (
        "import os, signal, sys; from pathlib import Path; import torch; from evenround.checkpoint import CheckpointWriter, TensorSpec\n"
        "def counted(call):\n"
        "    def wrapped(*args):\n"
        "        left[0] -= 1\n"
        "        if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return call(*args)\n"
        "    return wrapped\n"
        "os.pwrite, os.fsync, os.replace = map(counted, (os.pwrite, lambda file: None, os.replace))\n"
        "data = {str(i): torch.full((5,), float(i)) for i in range(4)}\n"
        "for moment in range(1, 100, 2):\n"
        "    left = [moment]\n"
        "    child = os.fork()\n"
        "    if child:\n"
        "        if os.waitpid(child, 0)[1] == 0: break\n"
        "        continue\n"
        "    specs = {k: TensorSpec(v.dtype, tuple(v.shape)) for k, v in data.items()}\n"
        "    writer = CheckpointWriter(Path(sys.argv[1]) / str(moment), specs, 40)\n"
        "    for name, tensor in data.items(): writer.write(name, tensor)\n"
        "    writer.flush(); writer.finish(data); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=source_env())
    data = {str(i): torch.full((5,), float(i)) for i in range(4)}
    moments = sorted(int(path.name) for path in tmp_path.iterdir())
    assert len(moments) > 10
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no power failures among the reruns
    write_all(tmp_path / "whole", data, 40)
    whole = files_of(tmp_path / "whole")
    opened = 0
    for moment in moments:
        directory = tmp_path / str(moment)
        try:
            ours = Checkpoint.open(directory)
        except UserError:
            pass
        else:  # whatever can be opened is whole
            opened += 1
            assert all(same(ours.read(name), data[name]) for name in data)
        write_all(directory, data, 40)
        assert {name: content for name, content in files_of(directory).items() if not name.endswith(".new")} == whole
    assert 1 <= opened <= 2  # done, and killed at the last sync after the index has its name


@pytest.mark.parametrize("victim", [FIRST, FIRST + ".partial"])
def test_other_checkpoints_are_refused(tmp_path: Path, victim: str) -> None:
    data = some_tensors()
    (tmp_path / victim).write_bytes(b"something else")
    message = f"{victim} belongs to another checkpoint or run; pass another --output_dir, or --overwrite to delete it"
    with pytest.raises(UserError, match=message):
        CheckpointWriter(tmp_path, specs_of(data), 170)
    assert files_of(tmp_path) == {victim: b"something else"}


def test_leftovers_that_readers_would_prefer_are_refused(tmp_path: Path) -> None:
    data = some_tensors()
    write_all(tmp_path / "a", data)
    with pytest.raises(UserError, match="model.safetensors belongs to another checkpoint"):
        CheckpointWriter(tmp_path / "a", specs_of(data), 170)
    write_all(tmp_path / "b", data, 170)
    with pytest.raises(UserError, match=f"{FIRST} belongs to another checkpoint"):
        CheckpointWriter(tmp_path / "b", specs_of(data), 10**9)
    (tmp_path / "b" / INDEX_FILE).write_text("{}")
    with pytest.raises(UserError, match=f"{INDEX_FILE} belongs to another checkpoint"):
        CheckpointWriter(tmp_path / "b", specs_of(data), 170)
    (tmp_path / "b" / (FIRST + ".partial")).write_bytes((tmp_path / "b" / FIRST).read_bytes())
    with pytest.raises(UserError, match="belongs to another checkpoint"):
        CheckpointWriter(tmp_path / "b", specs_of(data), 170)


def test_remove_checkpoint(tmp_path: Path) -> None:
    remove_checkpoint(tmp_path / "nowhere")
    write_all(tmp_path, some_tensors(), 170)
    for name in ("config.json", "model.safetensors.partial", "model.safetensors.partial.new", "my_model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    remove_checkpoint(tmp_path)
    assert sorted(files_of(tmp_path)) == ["config.json", "my_model.safetensors"]


def test_a_deleted_file_is_noticed(tmp_path: Path) -> None:
    data = some_tensors()
    first = CheckpointWriter(tmp_path, specs_of(data), 170)
    for name in data:
        first.write(name, data[name])
    (tmp_path / (SECOND + ".partial")).unlink()
    second = CheckpointWriter(tmp_path, specs_of(data), 170)
    assert second.fresh == {name for name in second.shards[1].offsets}
    message = rf"{SECOND}.partial: an earlier run wrote tensor '.*' and the file was deleted since; start anew with --overwrite"
    with pytest.raises(UserError, match=message):
        second.finish(data)


@pytest.mark.skipif(sys.platform != "linux", reason="posix_fallocate")
def test_a_full_disk_shows_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = specs_of(some_tensors())
    size = CheckpointWriter.shard_plan(specs, 10**9)[0].size
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    message = rf"model.safetensors.partial: the disk is full, {size} bytes \({size} B\) needed; free some space, or pass an --output_dir"
    with pytest.raises(UserError, match=message):
        CheckpointWriter(tmp_path, specs, 10**9)
    assert files_of(tmp_path) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="posix_fallocate")
def test_the_disk_fills_up_with_the_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([os.posix_fallocate, failing(errno.EDQUOT)])
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: next(calls)(*args))
    with pytest.raises(UserError, match=f"{SECOND}.partial: the disk is full"):
        CheckpointWriter(tmp_path, specs_of(some_tensors()), 170)
    assert files_of(tmp_path) == {}


def test_more_than_the_disk_holds(tmp_path: Path) -> None:
    specs = {"a": TensorSpec(torch.uint8, (2**58,))}
    with pytest.raises(UserError, match=r"the disk is full, \d+ bytes \(262144.0 TiB\) needed, \d+ \(.*\) free; free some space"):
        CheckpointWriter(tmp_path, specs, 10**9)
    assert files_of(tmp_path) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="posix_fallocate")
def test_file_systems_that_cannot_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    write_all(tmp_path, some_tensors())
    assert load_file(tmp_path / SINGLE_FILE).keys() == some_tensors().keys()


def test_the_disk_fills_up_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = some_tensors()
    writer = CheckpointWriter(tmp_path, specs_of(data), 10**9)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.ENOSPC))
        with pytest.raises(UserError, match=r"model.safetensors.partial: the disk is full, 160 bytes \(160 B\) needed"):
            writer.write("embed", data["embed"])
        patch.setattr(os, "fsync", failing(errno.EIO))
        writer._touched.add(SINGLE_FILE)
        with pytest.raises(UserError, match=r"partial: \d+ bytes \(.*\) cannot be written: Input/output error; check --output_dir"):
            writer.flush()
    write_all(tmp_path, data)  # space was freed: goes on
    assert Checkpoint.open(tmp_path).names


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.EACCES, r"no permission to write \d+ bytes \(.*\) \(Permission denied\); pass another --output_dir"),
        (errno.EROFS, r"no permission to write \d+ bytes \(.*\) \(Read-only file system\)"),
        (errno.EFBIG, r"\d+ bytes \(.*\) are too many for one file here; pass a smaller --max_shard_size"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str) -> None:
    monkeypatch.setattr(os, "open", failing(code))
    with pytest.raises(UserError, match="model.safetensors.partial: " + message):
        CheckpointWriter(tmp_path, specs_of(some_tensors()), 10**9)


def test_a_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"{path}: there is a file where a directory is needed; pass another --output_dir"):
            CheckpointWriter(path, specs_of(some_tensors()), 10**9)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: failing(errno.EACCES)())
    with pytest.raises(UserError, match=r"new: no permission to write \d+ bytes"):
        CheckpointWriter(tmp_path / "new", specs_of(some_tensors()), 10**9)


def test_a_real_limit_on_file_size(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(UserError, match=r"safetensors.partial: .* are too many for one file here; pass a smaller --max_shard_size"):
            CheckpointWriter(tmp_path, {"a": TensorSpec(torch.uint8, (20_000,))}, 10**9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_of(tmp_path) == {}


def test_atomic_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    atomic_write_text(path, "één")
    assert path.read_text(encoding="utf-8") == "één"
    atomic_write_bytes(path, b"")
    assert path.read_bytes() == b""
    atomic_write_bytes(path, b"old")
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(UserError, match=r"run.json: the disk is full, 3 bytes \(3 B\) needed"):
        atomic_write_bytes(path, b"new")
    assert files_of(tmp_path) == {"run.json": b"old"}
    with pytest.raises(UserError, match="none/run.json: .* cannot be written: No such file or directory"):
        atomic_write_text(tmp_path / "none" / "run.json", "x")


# ------------------------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2**31), (" 1.5 kib ", 1536), ("1tb", 10**12), ("7", 7), (9, 9), ("100B", 100)],
)
def test_parse_size(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "0GB", "5 GB MB", 0, "1e9", "0.1B"])
def test_sizes_that_cannot_be_read(text: str | int) -> None:
    with pytest.raises(UserError, match=r"size .* \(--max_shard_size\) cannot be read; write a positive number and a unit, such as 5GB"):
        parse_size(text)
