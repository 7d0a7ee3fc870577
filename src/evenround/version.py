"""The package's version, written down here and nowhere else: the build reads this file, and the run record imports it."""

__version__ = "0.1.0"
