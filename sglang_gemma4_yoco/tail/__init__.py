"""What runs on the kept rows of a batch: its layers, its attention, and the graphs of both."""
