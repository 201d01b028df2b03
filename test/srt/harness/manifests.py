"""The manifests of ``deploy/kubernetes`` as kustomize renders them, with the plugin's wheel."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.validators import run
from scripts.environment import REPO

IGNORED = shutil.ignore_patterns("*.whl", "__pycache__")


def copy_sources(directory: Path) -> Path:
    """Return a folder with the files that Docker's build gets; building writes beside them."""
    copy = directory / "sources"
    copy.mkdir()
    for name in re.findall(r"^!(.+)$", (REPO / ".dockerignore").read_text(), re.MULTILINE):
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, copy / name, ignore=IGNORED)
        elif (REPO / name).exists():
            shutil.copy(REPO / name, copy)
    return copy


def with_wheel(directory: Path) -> Path:
    """Return the folder of a copy of the manifests, with the wheel in it."""
    manifests, sources = directory / "kubernetes", copy_sources(directory)
    shutil.copytree(REPO / "deploy" / "kubernetes", manifests, ignore=IGNORED)
    build = ("uv", "build", "-q", "--wheel", "--no-build-isolation", "--python", sys.executable)
    run(*build, "--out-dir", manifests / "wheel", sources)
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
