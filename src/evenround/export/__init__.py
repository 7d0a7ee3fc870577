"""Checkpoint formats by name, and the way back from a checkpoint's config to its quantized weights."""

from collections.abc import Mapping
from types import MappingProxyType

from evenround.checkpoint import TensorSpec
from evenround.errors import UserError, nearest
from evenround.export.auto_round import AutoRoundExporter
from evenround.export.base import INPUT_LEAVES, PACKED_LEAVES, Exporter, Reader, StoredInput, StoredWeight, is_packed, tensor_prefix
from evenround.export.fake import PACKING, FakeExporter
from evenround.export.llm_compressor import LlmCompressorExporter

__all__ = [
    "EXPORTERS", "INPUT_LEAVES", "PACKED_LEAVES", "Exporter", "Reader", "StoredInput", "StoredWeight", "format_of", "get_exporter",
    "is_packed", "read_inputs", "read_schemes", "tensor_prefix",
]  # fmt: skip

EXPORTERS: Mapping[str, Exporter] = MappingProxyType(
    {exporter.name: exporter for exporter in (AutoRoundExporter(), LlmCompressorExporter(), FakeExporter())}
)
"""Formats by their name in `--format`."""

NOT_YET = ("auto_gptq", "gptqmodel", "auto_awq", "fp8", "mlx", "svdquant_nunchaku")


def get_exporter(name: str) -> Exporter:
    """The format called `name`. Raises `UserError` with the nearest name, or saying that the format is not implemented yet."""
    if name in EXPORTERS:
        return EXPORTERS[name]
    available = ", ".join(EXPORTERS)
    family, _, variant = name.partition(":")
    if family == "auto_round" and variant:
        raise UserError(f"format {name!r} (--format) is not implemented yet; 'auto_round' chooses its packing by the schemes")
    if family in ("gguf", *NOT_YET):
        raise UserError(f"format {name!r} (--format) is not implemented yet; implemented are: {available}")
    raise UserError(f"no format {name!r} (--format){nearest(name, EXPORTERS) or '.'} Formats: {available}")


METHODS: Mapping[str, str] = MappingProxyType({"auto-round": "auto_round", "compressed-tensors": "llm_compressor"})
"""quant_method in config.json → format."""


def format_of(config: Mapping[str, object]) -> str:
    """The format of a checkpoint with this config.json. Raises `UserError` for a quantization_config that no format can read."""
    section = config.get("quantization_config")
    if section is None:
        return "fake"
    if not isinstance(section, Mapping):
        raise UserError(f"quantization_config in config.json must be an object, not {type(section).__name__}")
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(f"quant_method {method!r} in config.json cannot be read; can: {', '.join(METHODS)}")
    return "fake" if method == "auto-round" and section.get("packing_format") == PACKING else METHODS[method]


def read_schemes(
    config: Mapping[str, object], specs: Mapping[str, TensorSpec], read: Reader, modules: Mapping[str, str] | None = None
) -> dict[str, StoredWeight]:
    """The packed weights of a checkpoint by module name; empty if there are none, as in format `fake`.

    `config`: all of config.json. The other arguments: `Exporter.read_schemes`. Raises `UserError` as it does, and for a method that cannot
    be read.
    """
    exporter, section = EXPORTERS[format_of(config)], config.get("quantization_config")
    return exporter.read_schemes(section if isinstance(section, Mapping) else {}, specs, read, modules)


def read_inputs(
    config: Mapping[str, object], specs: Mapping[str, TensorSpec], modules: Mapping[str, str], stored: Mapping[str, StoredWeight]
) -> dict[str, StoredInput]:
    """How the inputs of linear layers are quantized, by module name: those of `stored` (from `read_schemes`), or what a `fake` config says.

    Arguments and errors as in `read_schemes`.
    """
    section = config.get("quantization_config")
    if isinstance(section, Mapping) and format_of(config) == "fake":
        return FakeExporter().read_inputs(section, specs, modules)
    return {name: weight.input for name, weight in stored.items() if weight.scheme.activation.quantized}
