"""Which rows of a batch are kept, and whether cutting it pays."""
