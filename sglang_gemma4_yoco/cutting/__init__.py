"""One batch on its way: decided, cut, or served by stock after all."""
