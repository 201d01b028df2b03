"""The operator's commands. None runs in a server; SGLang is imported only where it is needed."""
