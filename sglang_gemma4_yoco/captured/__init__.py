"""The tail captured in CUDA graphs, which the core uses as ``ModelState.captured``."""
