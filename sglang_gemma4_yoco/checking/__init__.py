"""Comparisons of the fast path with stock, on this device and with these weights."""
