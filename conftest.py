"""Beside it is what tests import as ``scripts``: pytest puts this folder into ``sys.path``."""

import pytest

# Before its first import, which is in test/srt/conftest.py: a failed assertion shows its values.
pytest.register_assert_rewrite("harness")
