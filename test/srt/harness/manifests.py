"""The manifests of ``deploy/kubernetes`` as kustomize renders them, with the plugin's wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.validators import run
from scripts.environment import REPO, find_uv


def with_wheel(directory: Path) -> Path:
    """Return the folder of a copy of the manifests, with the wheel in it.

    The wheel is built from the files that Docker's build gets.
    """
    manifests, context = directory / "kubernetes", directory / "context"
    ignored = shutil.ignore_patterns("*.whl", "__pycache__")
    shutil.copytree(REPO / "deploy" / "kubernetes", manifests, ignore=ignored)
    context.mkdir()
    for name in re.findall(r"^!(.+)$", (REPO / ".dockerignore").read_text(), re.MULTILINE):
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, context / name, ignore=ignored)
        elif (REPO / name).exists():
            shutil.copy(REPO / name, context)
    build = (find_uv(Path(sys.prefix)), "build", "-q", "--wheel", "--no-build-isolation")
    options = ("--python", sys.executable, "--out-dir", manifests / "wheel", context)
    subprocess.run([*build, *options], check=True)
    return manifests


def render(kustomization: Path) -> list[Any]:
    """Return a kustomization's documents, which Kubernetes's schema accepts."""
    rendered = kustomization / "rendered.yaml"
    rendered.write_text(run("kubectl", "kustomize", kustomization))
    run("kubernetes-validate", "--strict", "--quiet", rendered)
    return list(yaml.safe_load_all(rendered.read_text()))


def workload(documents: Sequence[Any]) -> Any:
    """Return the only document that has a pod."""
    [found] = [one for one in documents if "template" in one.get("spec", ())]
    return found


def pod(documents: Sequence[Any]) -> Any:
    """Return the specification of the only workload's pods."""
    return workload(documents)["spec"]["template"]["spec"]
