"""Start-up of all Python processes of the tests, whose PYTHONPATH has this folder.

Each process of a server imports about 8000 modules, and spends a fifth of that time on collecting
garbage among objects that stay alive. A test run starts two hundred such processes.

A deprecated function that the package calls is an error, as in pytest's own process.
"""

import gc
import warnings

gc.set_threshold(100_000)
warnings.filterwarnings("error", category=DeprecationWarning, module=r"sglang_gemma4_yoco(\.|$)")
