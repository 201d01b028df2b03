"""Into SGLang's classes: once for each process, and for each runner that starts."""
