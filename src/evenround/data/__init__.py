"""Files that the package ships, by path: two texts and a small trained model. Sources and licences: README.md in this folder.

They are plain files next to this module, so the package must be installed as files (as pip does), not run out of a zip archive.
"""

from pathlib import Path

_HERE = Path(__file__).parent


def calibration_text() -> Path:
    """`calibration.txt`: 578 kB of ASCII, excerpts of 40 State of the Union addresses, one a paragraph. Public domain (CC0)."""
    return _HERE / "calibration.txt"


def evaluation_text() -> Path:
    """`evaluation.txt`: 298 kB of ASCII, the first chapters of Moby Dick; shares nothing with `calibration_text()`. Public domain (CC0)."""
    return _HERE / "evaluation.txt"


def tiny_llama() -> Path:
    """`tiny-llama/`: a trained Llama of 3.7 M parameters as a checkpoint directory (bf16 safetensors, tokenizer; 4 layers, width 256)."""
    return _HERE / "tiny-llama"
