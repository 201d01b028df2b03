"""The operator's commands. None of them runs in a server; SGLang is imported only where one must."""
