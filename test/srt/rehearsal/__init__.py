"""A CUDA device for a machine without one: see ``device``, and ``runtime.cpp`` for its model."""
