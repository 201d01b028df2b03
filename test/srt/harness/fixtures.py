"""Types of fixtures that are functions; ``conftest.py`` has the fixtures."""

from __future__ import annotations

from collections.abc import Callable

#: Changes something, given by name, for the rest of the test.
Change = Callable[..., None]
#: Returns the package's log lines so far, at a level or above.
Said = Callable[..., list[str]]
