"""Files of ``deploy/``: validators accept them, and SGLang knows their flags and variables."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from harness.manifests import pod, render, workload
from harness.validators import run
from scripts.environment import REPO
from sglang_gemma4_yoco import settings

DEPLOY, HARNESS = REPO / "deploy", Path(__file__).parents[1] / "harness"
COMPOSE, UNIT = DEPLOY / "compose.yaml", DEPLOY / "sglang-gemma4.service"
[SERVICE] = yaml.safe_load(COMPOSE.read_text())["services"].values()
OVERLAYS = BASE, FAST, CANARY, VERIFY = ("base", "fast", "canary", "verify")
FOREIGN = sorted((HARNESS / "deployments").glob("*.yaml"))
RESTRICTED = json.loads((HARNESS / "restricted.json").read_text())
INSTALLING = "install-gemma4-yoco"

#: Where SGLang, and libraries that it configures, would put their caches in each environment.
CACHES = """
import importlib, json, os, sys
from huggingface_hub import constants
from sglang.kernels.jit.utils.compile.cache import cache_root
from sglang.srt.environ import third_party_cache_defaults
for environment in json.load(sys.stdin):
    os.environ.clear()
    os.environ.update(environment)
    importlib.reload(constants)
    found = {**third_party_cache_defaults(), "JIT": cache_root(), "HF": constants.HF_HUB_CACHE}
    print(json.dumps({name: environment.get(name, str(path)) for name, path in found.items()}))
"""


@pytest.fixture(scope="module")
def rendered(manifests: Path) -> dict[str, list[Any]]:
    return {name: render(manifests / name) for name in OVERLAYS}


def test_compose_accepts_the_file() -> None:
    run("docker-compose", "-f", COMPOSE, "config", "-q")


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """It refuses a unit whose program is missing. Containers without systemd lack the validator."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze comes with systemd alone")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/sglang/bin/sglang", "/bin/true"))
    run("systemd-analyze", "verify", unit)


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_restricted_and_their_roots_read_only(
    rendered: dict[str, list[Any]], name: str
) -> None:
    jsonschema.validate(workload(rendered[name])["spec"]["template"], RESTRICTED)


def server(documents: Sequence[Any]) -> Any:
    """Return the first container of the only workload."""
    return pod(documents)["containers"][0]


def environment(container: Any) -> dict[str, str]:
    """Return a container's variables, except those whose values others have."""
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


@pytest.fixture(scope="module")
def environments(rendered: dict[str, list[Any]]) -> dict[str, dict[str, str]]:
    """Return each file's variables."""
    lines = re.findall(r"^Environment=(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE)
    pods = {name: environment(server(documents)) for name, documents in rendered.items()}
    return {**pods, COMPOSE.name: SERVICE["environment"], UNIT.name: dict(lines)}


def test_caches_are_kept(environments: dict[str, dict[str, str]]) -> None:
    """Also without a home directory: all caches of SGLang are on the file's volume."""
    asked = [{k: v for k, v in one.items() if k != "HOME"} for one in environments.values()]
    ask = [sys.executable, "-c", CACHES]
    said = subprocess.run(ask, input=json.dumps(asked), text=True, check=True, stdout=-1).stdout
    for name, line in zip(environments, said.splitlines(), strict=True):
        volume = "/var/cache/sglang-gemma4/" if name == UNIT.name else "/cache/"
        for cache, path in json.loads(line).items():
            assert path.startswith(volume), (name, cache)


def test_the_switch_is_there(environments: dict[str, dict[str, str]]) -> None:
    for name in (COMPOSE.name, UNIT.name):
        found = {one: value for one, value in environments[name].items() if "YOCO" in one}
        assert found == {settings.SWITCH: "1"}


def test_sglang_knows_the_flags(rendered: dict[str, list[Any]]) -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    [line] = re.findall(r"^ExecStart=\S+ serve (.*)$", UNIT.read_text(), re.MULTILINE)
    container = server(rendered[BASE])
    assert SERVICE["command"][:2] == container["command"] == ["sglang", "serve"]
    for flags in (line.split(), SERVICE["command"][2:], container["args"]):
        served = parser.parse_args(flags)
        assert served.enable_metrics
        assert served.port == container["ports"][0]["containerPort"]


def test_verify_runs_what_is_served(rendered: dict[str, list[Any]]) -> None:
    """The image, the model, the caches, the GPU and the installation are the Deployment's."""
    verifying, serving = pod(rendered[VERIFY]), pod(rendered[FAST])
    assert verifying["initContainers"] == serving["initContainers"]
    assert verifying["securityContext"] == serving["securityContext"]
    assert verifying["volumes"] == serving["volumes"]
    [verify], [served] = verifying["containers"], serving["containers"]
    assert verify["args"][0] == served["args"][0]
    for name in ("image", "resources", "volumeMounts", "env", "securityContext"):
        assert verify[name] == served[name]


def test_the_canary_stands_beside_stock(rendered: dict[str, list[Any]]) -> None:
    """One Service has both, another one only the canary. They have no object in common."""
    both, names, selectors = rendered[BASE] + rendered[CANARY], set(), []
    for one in both:
        names.add((one["kind"], one["metadata"]["name"]))
        if one["kind"] == "Service":
            selectors.append(one["spec"]["selector"])
    assert len(names) == len(both)
    stock, fast = (workload(rendered[name])["spec"] for name in (BASE, CANARY))
    for one in (stock, fast):
        assert one["selector"]["matchLabels"] == one["template"]["metadata"]["labels"]
    shared, own = selectors
    assert own == fast["selector"]["matchLabels"]
    assert shared.items() == own.items() & stock["selector"]["matchLabels"].items()
    # The claim is stock's.
    claims = [one for one in pod(rendered[BASE])["volumes"] if "persistentVolumeClaim" in one]
    assert [one for one in pod(rendered[CANARY])["volumes"] if one in claims] == claims != []
    assert "PersistentVolumeClaim" not in [one["kind"] for one in rendered[CANARY]]


def add_plugin(manifests: Path, directory: Path, *resources: Path) -> Path:
    """Return a folder whose kustomization adds the plugin to these files."""
    for file in resources:
        shutil.copy(file, directory)
    text = {
        "namespace": "models",
        "resources": [file.name for file in resources],
        "components": [os.path.relpath(manifests / "plugin", directory)],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return directory


@pytest.mark.parametrize("file", FOREIGN, ids=lambda file: file.stem)
def test_a_deployment_that_exists_gets_the_plugin(
    manifests: Path, tmp_path: Path, file: Path
) -> None:
    """Its first container finds what an init container of the same image installs."""
    documents = render(add_plugin(manifests, tmp_path, file))
    original, changed = yaml.safe_load(file.read_text()), workload(documents)
    texts = [yaml.safe_dump(one).replace("- ", "  ").splitlines() for one in (original, changed)]
    # Lines are added, and none is changed: that of PYTHONPATH, for example.
    assert not [line for line in difflib.ndiff(*texts) if line.startswith("- ")]
    found, [first, *others] = pod(documents), pod(documents)["containers"]
    assert others == pod([original])["containers"][1:]
    [installing] = [one for one in found["initContainers"] if one["name"] == INSTALLING]
    assert installing["image"] == first["image"]
    base = environment(installing)["PYTHONUSERBASE"]
    assert environment(first)["PYTHONUSERBASE"] == base
    mounted = {"name": "gemma4-yoco", "mountPath": base}
    assert mounted in installing["volumeMounts"]
    assert mounted in first["volumeMounts"]
    [wheel] = [one["metadata"] for one in documents if one["kind"] == "ConfigMap"]
    assert wheel["namespace"] == changed["metadata"]["namespace"]
    assert {"name": wheel["name"]} in [one.get("configMap") for one in found["volumes"]]


@pytest.mark.parametrize(
    ("resources", "error"), [((), "nothing selected by Deployment"), (FOREIGN, "multiple matches")]
)
def test_which_deployment_is_meant_is_clear(
    manifests: Path, tmp_path: Path, resources: Sequence[Path], error: str
) -> None:
    with pytest.raises(AssertionError, match=error):
        render(add_plugin(manifests, tmp_path, *resources))


def test_the_dockerfile() -> None:
    run("hadolint", REPO / "Dockerfile")
