"""Start-up: what is patched once per process, and what is set up for each runner, by moment."""
