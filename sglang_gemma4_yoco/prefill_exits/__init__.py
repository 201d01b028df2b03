"""Exits from prefills that SGLang has captured in CUDA graphs, and the fix of that capture."""
