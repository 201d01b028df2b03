"""One batch on its way: planned, its rows gathered and scattered, or served by stock after all."""
