"""Adapters of the text models that can be cut, one file each."""
