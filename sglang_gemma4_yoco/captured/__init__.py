"""The tail captured in CUDA graphs; the core uses it as ``ModelState.captured``."""
