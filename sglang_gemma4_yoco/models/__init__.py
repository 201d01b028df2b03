"""The text models that can be cut: one file for each."""
