"""What operators see of it while it serves: log lines, counters, metrics."""
