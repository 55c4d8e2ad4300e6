"""Files of deployments: the systemd unit, the Dockerfile and the Kubernetes example fit the command and its routes."""

from __future__ import annotations

import configparser
import inspect
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from protocol_fixtures import reverse_client
from typer.main import get_command

from transduce.cli.serve import serve

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "transduce.service"


def parsed(arguments: list[str]) -> dict[str, object]:
    """The options of `transduce serve`, as the command line reads these arguments."""
    app = typer.Typer()
    app.command()(serve)
    command = get_command(app)
    return dict(command.make_context("serve", arguments).params)


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=False)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(UNIT.read_text(encoding="utf-8"))
    return found


def test_the_unit_starts_reloads_and_drains_the_server() -> None:
    section = unit()["Service"]
    program, command, *arguments = section["ExecStart"].split()
    assert (Path(program).name, command) == ("transduce", "serve")
    options = parsed(arguments)
    assert str(options["api_key_file"]).endswith("/keys")
    assert section["LoadCredential"].startswith("keys:")
    assert section["ExecReload"].split()[1] == "-HUP"
    drain = inspect.signature(serve).parameters["drain_seconds"].default
    assert int(section["TimeoutStopSec"]) > drain  # accepted requests are answered before systemd kills


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(encoding="utf-8"))
    (tmp_path / UNIT.name).write_text(text, encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / UNIT.name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_image_has_the_extras_of_a_server_and_the_files_that_it_copies() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    extras = set(re.findall(r"'\.\[([\w,]+)\]'", "\n".join(lines))[0].split(","))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"serve", "image", "sound"} <= extras <= set(known)
    for line in lines:
        if line.startswith("COPY "):
            assert all((ROOT / name).exists() for name in line.split()[1:-1]), line
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] != "root"
    assert 'ENTRYPOINT ["transduce"]' in lines


def test_the_kubernetes_example_probes_routes_that_exist_and_need_no_key() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yml\n(.*?)```", page, re.DOTALL)
    spec = yaml.safe_load(text)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    options = parsed(container["args"][1:])
    assert (container["args"][0], options["host"]) == ("serve", "0.0.0.0")
    drain = inspect.signature(serve).parameters["drain_seconds"].default
    assert spec["terminationGracePeriodSeconds"] > drain
    (port,) = container["ports"]
    server = reverse_client("secret")
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]["httpGet"]
        assert probe["port"] == port["containerPort"] == options["port"]
        assert server.get(probe["path"]).status_code == 200
