"""A CUDA device for a machine without one; ``device`` says how, ``runtime.cpp`` what it models."""
