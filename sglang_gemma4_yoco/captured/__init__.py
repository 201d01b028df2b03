"""The tail captured in CUDA graphs; it hooks on to the core as ``ModelState.captured``."""
