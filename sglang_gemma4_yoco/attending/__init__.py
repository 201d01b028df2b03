"""What the tail runs on: its attention backend, and the graphs that replay it."""
