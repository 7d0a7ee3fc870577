"""Checkpoint formats by name, and the way back from a checkpoint's config to its quantized weights."""

from collections.abc import Mapping
from types import MappingProxyType

from evenround.checkpoint import TensorSpec
from evenround.errors import UserError, nearest
from evenround.export.auto_round import AutoRoundExporter
from evenround.export.base import Exporter, Reader, StoredWeight, tensor_prefix
from evenround.export.fake import FakeExporter
from evenround.export.llm_compressor import LlmCompressorExporter

__all__ = ["EXPORTERS", "Exporter", "Reader", "StoredWeight", "get_exporter", "read_schemes", "tensor_prefix"]

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


def read_schemes(
    config: Mapping[str, object], specs: Mapping[str, TensorSpec], read: Reader, modules: Mapping[str, str] | None = None
) -> dict[str, StoredWeight]:
    """The quantized weights of a checkpoint by module name; empty if config.json has no `quantization_config`.

    `config`: all of config.json. The other arguments: `Exporter.read_schemes`. Raises `UserError` as it does, and for a method that cannot
    be read.
    """
    section = config.get("quantization_config")
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise UserError(f"quantization_config in config.json must be an object, not {type(section).__name__}")
    method = section.get("quant_method")
    readers = {"auto-round": "auto_round", "compressed-tensors": "llm_compressor"}
    if not isinstance(method, str) or method not in readers:
        raise UserError(f"quant_method {method!r} in config.json cannot be read; can: {', '.join(readers)}")
    return EXPORTERS[readers[method]].read_schemes(section, specs, read, modules)
