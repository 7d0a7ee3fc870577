"""Evenround: quantize large language models by block tuning, evenly over the devices at hand, without running out of memory."""

from evenround.api import AutoRound, plan, quantize
from evenround.errors import UserError
from evenround.scheme import Scheme, WeightScheme
from evenround.version import __version__

__all__ = ["AutoRound", "Scheme", "UserError", "WeightScheme", "__version__", "plan", "quantize"]
