"""What the core must know of a text model: one file for each."""
