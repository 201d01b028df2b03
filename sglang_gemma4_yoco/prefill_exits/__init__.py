"""Exits from prefills that SGLang has captured in CUDA graphs, and the repair of that capture."""
