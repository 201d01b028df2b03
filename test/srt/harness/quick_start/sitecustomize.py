"""Start-up of all Python processes of the tests, whose PYTHONPATH has this folder.

Each process of a server imports some 8000 modules. A fifth of that time it collects garbage among
what stays anyway, and a test run starts two hundred such processes.

A deprecated function that the package calls is an error, as in pytest's own process.
"""

import gc
import warnings

gc.set_threshold(100_000)
warnings.filterwarnings("error", category=DeprecationWarning, module=r"sglang_gemma4_yoco(\.|$)")
