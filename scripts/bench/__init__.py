"""Measurements, in an environment with SGLang."""
