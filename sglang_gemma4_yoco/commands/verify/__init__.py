"""The command ``verify``."""
