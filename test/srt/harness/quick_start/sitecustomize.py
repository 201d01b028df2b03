"""Python imports this at start where its folder is in PYTHONPATH: in all that the tests start.

Each process of a server imports some 8000 modules. A fifth of that time it collects garbage among
what stays anyway, and a test run starts two hundred such processes.
"""

import gc

gc.set_threshold(100_000)
