"""Exits from prefills that SGLang has captured in CUDA graphs. Without them these run as stock."""
