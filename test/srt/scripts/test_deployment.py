"""Files of ``deploy/``: validators accept them, and SGLang knows their flags."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.environment import REPO
from sglang_gemma4_yoco import settings

DEPLOY = REPO / "deploy"
KUBERNETES, COMPOSE, UNIT = (
    DEPLOY / name for name in ("kubernetes.yaml", "compose.yaml", "sglang-gemma4.service")
)
FILES = (KUBERNETES, COMPOSE, UNIT)


def validate(command: Sequence[str | Path]) -> None:
    """Run a validator, which must accept; skip the test where it is not installed."""
    beside = Path(sys.executable).parent
    program = shutil.which(command[0], path=f"{beside}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr


def test_kubernetes_accepts_the_manifest() -> None:
    validate(["kubernetes-validate", "--strict", "--quiet", KUBERNETES])


def test_compose_accepts_the_file() -> None:
    validate(["docker-compose", "-f", COMPOSE, "config", "-q"])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """It refuses a unit whose program is missing."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/sglang/bin/sglang", "/bin/true"))
    validate(["systemd-analyze", "verify", unit])


def pod(manifest: str = KUBERNETES.read_text()) -> Any:
    """Return the specification of a Deployment's pods."""
    return deployment_of(manifest)["spec"]["template"]["spec"]


def deployment_of(manifest: str) -> Any:
    """Return the only Deployment of a manifest."""
    documents = yaml.safe_load_all(manifest)
    [deployment] = [one for one in documents if one["kind"] == "Deployment"]
    return deployment


def flags_of_server(file: Path) -> list[str]:
    """Return the flags behind ``sglang serve``."""
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


def test_a_first_start_has_half_an_hour() -> None:
    """A server that is killed while it compiles kernels would restart for ever."""
    [container] = pod()["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 30 * 60


def test_doctor_gets_the_model_of_the_server() -> None:
    [doctor], [server] = pod()["initContainers"], pod()["containers"]
    [command] = doctor["args"]
    model = server["args"][0].removeprefix("--model-path=")
    assert f"doctor --model-path {model} -- " in command
    for name in ("env", "resources", "volumeMounts", "image"):
        assert doctor[name] == server[name]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_sglang_knows_the_flags(file: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    served = parser.parse_args(flags_of_server(file))
    assert (served.model_path, served.port) == ("google/gemma-4-E2B-it", 30000)
    assert served.enable_metrics


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_switch_is_there_and_caches_are_kept(file: Path) -> None:
    text = file.read_text()
    assert set(re.findall(r"SGLANG_GEMMA4_YOCO\w*", text)) == {settings.SWITCH}
    for variable in ("TRITON_CACHE_DIR", "TVM_FFI_CACHE_DIR", "HF_HOME"):
        assert re.search(rf"{variable}\W.*/\w*cache/", text)


def test_the_stock_replica_of_a_canary_is_another_deployment() -> None:
    """The command is that of docs/deploying.md, up to the pipe into kubectl."""
    page = (REPO / "docs" / "deploying.md").read_text()
    found = re.search(r"^(sed (?s:.*?)) \| kubectl apply -f -$", page, re.MULTILINE)
    assert found is not None
    command = found[1].replace("\\\n", " ")
    stock = subprocess.run(command, shell=True, cwd=REPO, capture_output=True, text=True).stdout
    one, other = deployment_of(KUBERNETES.read_text()), deployment_of(stock)
    assert one["metadata"]["name"] != other["metadata"]["name"]
    labels = other["spec"]["template"]["metadata"]["labels"]
    assert other["spec"]["selector"]["matchLabels"] == labels
    assert one["spec"]["selector"]["matchLabels"] != labels
    [container] = pod(stock)["containers"]
    assert container["env"][0] == {"name": settings.SWITCH, "value": "0"}
