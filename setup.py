"""Write the commit into the wheel and the source distribution; pyproject.toml has the rest.

It is the variable SGLANG_GEMMA4_YOCO_COMMIT if set, for builds without ``.git`` (the Dockerfile's),
else what git says. A wheel that is built from a source distribution keeps that one's commit.
"""

import os
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
# Read by sglang_gemma4_yoco/__init__.py.
COMMIT = Path("sglang_gemma4_yoco", "COMMIT")
# The whole hash, and "-dirty" if files differ from it; a tag would hide the hash.
DESCRIBE = ("git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def find_commit() -> str:
    """Return the commit that is built, or ``unknown``."""
    given = os.environ.get("SGLANG_GEMMA4_YOCO_COMMIT", "").strip()
    if given:
        return given
    # Without this check git would name the commit of a repository around this folder.
    if (HERE / ".git").exists():
        try:
            return subprocess.run(
                DESCRIBE, cwd=HERE, check=True, capture_output=True, text=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # no git, or it refuses the folder
            return "unknown"
    stored = HERE / COMMIT
    if stored.exists():
        return stored.read_text().strip()
    return "unknown"


class BuildWithCommit(build_py):
    """Write the commit beside the modules of a wheel; an editable installation follows the tree."""

    def run(self) -> None:
        """Build."""
        super().run()
        if not self.editable_mode:
            (Path(self.build_lib) / COMMIT).write_text(find_commit() + "\n")


class DistributeWithCommit(sdist):
    """Write the commit into the source distribution, which contains no ``.git``."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Collect the files."""
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / COMMIT).write_text(find_commit() + "\n")


setup(cmdclass={"build_py": BuildWithCommit, "sdist": DistributeWithCommit})
