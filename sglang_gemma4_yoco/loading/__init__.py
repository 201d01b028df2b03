"""The connection to SGLang: patches once per process, setup for each runner."""
