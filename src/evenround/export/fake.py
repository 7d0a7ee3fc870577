"""`fake`: quantized weights multiplied out, in the source checkpoint's own names, layout and dtype.

Any loader of the original loads it, and it is the only format that holds a ragged last group. It saves no space; it answers what a
quantization costs in accuracy. What we gave up: nothing in the file says which scheme the weights came from (the run record does).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from evenround.checkpoint import TensorSpec
from evenround.errors import UserError
from evenround.export.base import Reader, StoredWeight, is_tied_head
from evenround.model import Site
from evenround.numerics.integer import QuantizedWeight
from evenround.scheme import Scheme, WeightScheme


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
        return ("format 'fake' stores plain weights: it measures accuracy and saves no space",)

    def stored(self, scheme: Scheme) -> Scheme:
        return scheme

    def tensor_specs(self, site: Site, scheme: Scheme) -> dict[str, TensorSpec]:
        out_features, in_features = site.shape
        shape = (in_features, out_features) if site.transposed else (out_features, in_features)
        return {self._tensor(site): TensorSpec(dtype=site.dtype, shape=shape)}

    def pack(self, site: Site, quantized: QuantizedWeight) -> dict[str, Tensor]:
        weight = quantized.dequantize(site.dtype)
        return {self._tensor(site): weight.t().contiguous() if site.transposed else weight}

    def _tensor(self, site: Site) -> str:
        """A quantized head that was tied to the embedding gets a tensor of its own."""
        return site.parameter if is_tied_head(site) else site.checkpoint_name

    def unpack(self, prefix: str, read: Reader, scheme: WeightScheme, shape: tuple[int, int]) -> QuantizedWeight:
        raise UserError(f"{prefix}: a checkpoint of format 'fake' holds plain weights, there are no codes to unpack; compare the weights")

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme | None],
        sites: Sequence[Site],
        settings: Mapping[str, object],
        default: Scheme,
        unquantized: Sequence[str] = (),
    ) -> None:
        return None

    def read_schemes(
        self, config: Mapping[str, object], specs: Mapping[str, TensorSpec], read: Reader, modules: Mapping[str, str] | None = None
    ) -> dict[str, StoredWeight]:
        """Empty: nothing in the file is quantized."""
        return {}
