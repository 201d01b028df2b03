"""Files of ``deploy/``: validators accept them, and SGLang knows their flags."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.validators import find
from scripts.environment import REPO
from sglang_gemma4_yoco import settings

DEPLOY = REPO / "deploy"
KUBERNETES, VERIFY, COMPOSE, UNIT = (
    DEPLOY / name
    for name in (
        *("kubernetes/fast/server.yaml", "kubernetes/verify.yaml"),
        *("compose.yaml", "sglang-gemma4.service"),
    )
)
FILES = (KUBERNETES, COMPOSE, UNIT)


def validate(command: Sequence[str | Path]) -> str:
    """Run a validator, which must accept, and return what it printed."""
    program = find(str(command[0]))
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the manifest of a canary's stock replica."""
    file = tmp_path_factory.mktemp("kubernetes") / "stock.yaml"
    file.write_text(validate(["kubectl", "kustomize", KUBERNETES.parents[1] / "stock"]))
    return file


@pytest.mark.parametrize("file", [KUBERNETES, VERIFY], ids=lambda file: file.name)
def test_kubernetes_accepts_the_manifest(file: Path) -> None:
    validate(["kubernetes-validate", "--strict", "--quiet", file])


def test_kubernetes_accepts_the_stock_replica(stock: Path) -> None:
    validate(["kubernetes-validate", "--strict", "--quiet", stock])


def test_compose_accepts_the_file() -> None:
    validate(["docker-compose", "-f", COMPOSE, "config", "-q"])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """It refuses a unit whose program is missing. Containers without systemd lack the validator."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze comes with systemd alone")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/sglang/bin/sglang", "/bin/true"))
    validate(["systemd-analyze", "verify", unit])


def read(manifest: Path, kind: str) -> list[Any]:
    """Return a manifest's documents of one kind."""
    documents = yaml.safe_load_all(manifest.read_text())
    return [one for one in documents if one["kind"] == kind]


def pod(manifest: Path = KUBERNETES) -> Any:
    """Return the specification of the only Deployment's pods."""
    [deployment] = read(manifest, "Deployment")
    return deployment["spec"]["template"]["spec"]


def flags_of_server(file: Path) -> list[str]:
    """Return the flags after ``sglang serve``."""
    if file == KUBERNETES:
        [server] = pod()["containers"]
        words = [*server["command"], *server["args"]]
    elif file == COMPOSE:
        [service] = yaml.safe_load(COMPOSE.read_text())["services"].values()
        words = service["command"]
    else:
        [line] = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
        words = line.split()
    assert Path(words[0]).name == "sglang"
    assert words[1] == "serve"
    return list(words[2:])


def test_doctor_gets_the_model_of_the_server() -> None:
    [doctor], [server] = pod()["initContainers"], pod()["containers"]
    [command] = doctor["args"]
    model, _, _, ranks, _ = server["args"]
    for flag in (model, ranks):
        assert flag.replace("=", " ") in command
    for name in ("env", "resources", "volumeMounts", "image"):
        assert doctor[name] == server[name]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_sglang_knows_the_flags(file: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    served = parser.parse_args(flags_of_server(file))
    assert served.enable_metrics
    # Probes, scrapers and other commands of the file name the same ones.
    text = file.read_text()
    assert set(re.findall(r"google/[\w.-]+", text)) == {served.model_path}
    assert set(re.findall(r"\b\d{5}\b", text)) == {str(served.port)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_switch_is_there_and_caches_are_kept(file: Path) -> None:
    text = file.read_text()
    assert set(re.findall(r"SGLANG_GEMMA4_YOCO\w*", text)) == {settings.SWITCH}
    kept = re.findall(r"(\w+)(?:, value: |: |=)/\S*cache/", text)
    for reader in ("triton.knobs", "tvm_ffi.cpp.extension", "huggingface_hub.constants"):
        found: Any = util.find_spec(reader)
        source = Path(found.origin).read_text()
        assert any(f'"{variable}"' in source for variable in kept), reader


def test_verify_runs_what_is_served() -> None:
    """The image, the model, the caches and the GPU are the Deployment's."""
    [job], [server] = read(VERIFY, "Job"), pod()["containers"]
    verifying = job["spec"]["template"]["spec"]
    [verify] = verifying["containers"]
    assert verifying["volumes"] == pod()["volumes"]
    assert verify["env"] == server["env"][1:]  # except the switch
    assert verify["args"][0] == server["args"][0]
    for name in ("image", "resources", "volumeMounts"):
        assert verify[name] == server[name]


def test_the_stock_replica_stands_beside_the_canary(stock: Path) -> None:
    """Each has a Service of its own, and one Service has both; the cache is the canary's."""
    names, selected = set[str](), []
    for manifest in (KUBERNETES, stock):
        [deployment] = read(manifest, "Deployment")
        names.add(deployment["metadata"]["name"])
        specification = deployment["spec"]
        labels = specification["template"]["metadata"]["labels"]
        assert specification["selector"]["matchLabels"] == labels
        selected.append(labels)
    assert len(names) == 2
    fast, other = selected
    shared, own = (one["spec"]["selector"] for one in read(KUBERNETES, "Service"))
    [others] = read(stock, "Service")
    assert (own, others["spec"]["selector"]) == (fast, other)
    assert shared.items() == fast.items() & other.items()
    assert not read(stock, "PersistentVolumeClaim")
    assert pod(stock)["volumes"] == pod()["volumes"]
    [one], [server] = pod()["containers"], pod(stock)["containers"]
    switch = {"name": settings.SWITCH, "value": "0"}
    assert server == {**one, "env": [switch, *one["env"][1:]]}
