"""`fake`: quantized weights multiplied out, in the source checkpoint's own names, layout and dtype.

It is the only format that holds every scheme, and a ragged last group. It saves no space; it answers what a quantization costs in accuracy.

Weight-only schemes leave config.json as it was: any loader of the original loads it, and nothing in the file says which scheme the weights
came from (the run record does).

Quantized activations happen when the model runs, so config.json must tell a loader of them: a plain load would measure another model.
quantization_config is auto-round's for this case, `"packing_format": "auto_round:fake"`: our own evaluation applies it, and so does
auto-round's reader inside transformers; other loaders stop at it instead of leaving the activations out in silence, and load the plain
weights once the section is deleted. Calibrated scales lie beside the weights as in the packed formats (input_scale, input_global_scale),
also where auto-round 0.16.1 forgets them (NVFP4: its reader then divides by 1).

Where that reader differs: it takes static FP8 scales from the values at hand, and stops with a TypeError at FP8 in tiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from evenround.checkpoint import TensorSpec
from evenround.errors import UserError
from evenround.export.autoround_config import SchemeFields, write_config
from evenround.export.base import (
    SCALE_DTYPES,
    Reader,
    StoredInput,
    StoredWeight,
    expect_tensor,
    input_specs,
    is_tied_head,
    pack_input,
    stored_input,
    tensor_prefix,
)
from evenround.model import Site
from evenround.numerics.quantized import QuantizedWeight
from evenround.scheme import Scheme

PACKING = "auto_round:fake"


@dataclass(frozen=True, slots=True)
class FakeExporter:
    """See the module. Methods as in `evenround.export.base.Exporter`."""

    name: str = "fake"
    allows_ragged: bool = True

    def for_schemes(self, schemes: Mapping[str, Scheme | None]) -> "FakeExporter":
        return self

    def check(self, site: Site, scheme: Scheme) -> None:
        """Plain weights hold every scheme."""

    def cautions(self, schemes: Mapping[str, Scheme | None]) -> tuple[str, ...]:
        found = ["format 'fake' stores plain weights: it measures accuracy and saves no space"]
        if any(scheme.activation.quantized for scheme in schemes.values() if scheme):
            found.append(
                "activations are quantized when the model runs: `evenround eval` and auto-round's reader do it; other loaders stop at "
                "quantization_config, and load the weights alone when it is deleted from config.json"
            )
        return tuple(found)

    def stored(self, scheme: Scheme) -> Scheme:
        return scheme

    def tensor_specs(self, site: Site, scheme: Scheme) -> dict[str, TensorSpec]:
        out_features, in_features = site.shape
        shape = (in_features, out_features) if site.transposed else (out_features, in_features)
        return {self._tensor(site): TensorSpec(dtype=site.dtype, shape=shape)} | input_specs(tensor_prefix(site), scheme.activation)

    def pack(self, site: Site, quantized: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
        weight = quantized.dequantize(site.dtype)
        tensors = {self._tensor(site): weight.t().contiguous() if site.transposed else weight}
        return tensors | pack_input(tensor_prefix(site), scheme.activation, quantized.input_scale)

    def _tensor(self, site: Site) -> str:
        """A quantized head that was tied to the embedding gets a tensor of its own."""
        return site.parameter if is_tied_head(site) else site.checkpoint_name

    def unpack(self, prefix: str, read: Reader, scheme: Scheme, shape: tuple[int, int]) -> QuantizedWeight:
        raise UserError(f"{prefix}: a checkpoint of format 'fake' holds plain weights, there are no codes to unpack; compare the weights")

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme | None],
        sites: Sequence[Site],
        settings: Mapping[str, object],
        default: Scheme,
        unquantized: Sequence[str] = (),
    ) -> dict[str, object] | None:
        """auto-round's fields where activations are quantized, else None."""
        if not any(scheme.activation.quantized for scheme in schemes.values() if scheme):
            return None
        return write_config(PACKING, schemes, sites, settings, default, unquantized)

    def read_schemes(
        self, config: Mapping[str, object], specs: Mapping[str, TensorSpec], read: Reader, modules: Mapping[str, str] | None = None
    ) -> dict[str, StoredWeight]:
        """Empty: no weight in the file is packed."""
        return {}

    def read_inputs(
        self, config: Mapping[str, object], specs: Mapping[str, TensorSpec], modules: Mapping[str, str]
    ) -> dict[str, StoredInput]:
        """How the inputs of the model's linear layers are quantized, by module name. `modules`: as in `read_schemes`.

        Raises `UserError` for a config that cannot be read and for missing scales.
        """
        fields = SchemeFields.read(config)
        found = {}
        for prefix, name in modules.items():
            scheme = fields.scheme(name)
            if scheme is None or not scheme.activation.quantized:
                continue
            found[name] = stored_input(prefix, scheme.activation)
            for tensor in input_specs(prefix, scheme.activation):
                expect_tensor(specs, tensor, SCALE_DTYPES, (1,))
        return found
