"""Pure tensor functions: no modules, no devices, no globals."""
