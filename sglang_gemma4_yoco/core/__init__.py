"""The mechanism: which servers and batches may be cut, and how one is."""
