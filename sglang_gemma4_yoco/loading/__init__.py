"""Connects the package to SGLang: patches once per process, set-up for each runner."""
