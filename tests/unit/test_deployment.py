"""The deployment files name commands, settings, ports and paths that exist."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from everstate.api.health import health_router
from everstate.cli import cli
from everstate.config import Config, load
from everstate.errors import InvalidConfig
from everstate.runtime.figures import ROLES
from everstate.runtime.supervisor import _FINAL, _PATIENCE_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = DEPLOY / "kubernetes" / "everstate.yaml"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
_VERSIONS = ("1.30.0", "1.37.0")
"""Oldest and newest Kubernetes whose schemas the manifests have to fit."""


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFESTS.read_text("utf-8")))


def deployments() -> dict[str, dict[str, Any]]:
    """Pod template of each deployment, by component."""
    found = [each for each in manifests() if each["kind"] == "Deployment"]
    return {each["metadata"]["name"].removeprefix("everstate-"): each["spec"] for each in found}


def unknown_settings(names: Mapping[str, Any] | list[str]) -> list[str]:
    """Environment variables that look like a setting and are none."""
    known = {
        f"EVERSTATE_{section}_{field}".upper()
        for section, info in Config.model_fields.items()
        for field in getattr(info.annotation, "model_fields", {})
    }
    return [name for name in names if name.startswith("EVERSTATE_") and name not in known]


def check_command(arguments: list[str]) -> None:
    """Parse a command line without running it; raises click's errors."""
    group = typer.main.get_group(cli)
    verb = group.get_command(typer.Context(group), arguments[0])
    assert verb is not None, arguments[0]
    verb.make_context(arguments[0], arguments[1:], resilient_parsing=False)


@pytest.mark.parametrize("version", _VERSIONS)
def test_manifests_fit_the_schemas_of_kubernetes(version: str) -> None:
    for each in manifests():
        kubernetes_validate.validate(each, version, strict=True)


def test_a_manifest_with_a_mistake_does_not_fit() -> None:
    (one, *_) = [each for each in manifests() if each["kind"] == "Deployment"]
    mistyped, wrong = copy.deepcopy(one), copy.deepcopy(one)
    container = mistyped["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container["livenessProbe"]
    wrong["spec"]["replicas"] = "one"
    for planted in (mistyped, wrong):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(planted, _VERSIONS[-1], strict=True)


def test_the_settings_of_the_manifests_are_settings(tmp_path: Path) -> None:
    (settings,) = [each for each in manifests() if each["kind"] == "ConfigMap"]
    (tmp_path / "everstate.toml").write_text(settings["data"]["everstate.toml"], "utf-8")
    assert load(tmp_path).logging.format == "json"
    (tmp_path / "everstate.toml").write_text("[logging]\nformat = 'yaml'\n", "utf-8")
    with pytest.raises(InvalidConfig):
        load(tmp_path)


def test_the_secret_of_the_page_has_settings_that_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "howto" / "deploy.md").read_text("utf-8")
    (command,) = re.findall(
        r"^kubectl create secret .*?(?=^kubectl)", page, re.MULTILINE | re.DOTALL
    )
    given = [
        each.removeprefix("--from-literal=").partition("=")[::2]
        for each in shlex.split(command)
        if each.startswith("--from-literal=")
    ]
    assert unknown_settings([name for name, _ in given]) == []
    for name, value in given:
        monkeypatch.setenv(name, value)
    config = load(tmp_path)
    assert config.api.tokens["desk"].permissions == {"*": ("read",)}
    assert config.store.dsn is not None
    assert config.alerts.webhook_url is not None


def test_each_container_runs_a_command_with_its_port_and_its_probes() -> None:
    assert {"relay", "pipeline", "alerts", "serve"} == set(deployments())
    paths = {route.path for route in health_router(None, None).routes}  # type: ignore[arg-type,attr-defined]
    for role, deployment in deployments().items():
        pod = deployment["template"]["spec"]
        (container,) = pod["containers"]
        check_command(container["args"])
        assert role in container["args"]
        assert unknown_settings([each["name"] for each in container["env"]]) == []
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        base = {each["name"]: each["value"] for each in container["env"]}["EVERSTATE_METRICS_PORT"]
        assert ports["metrics"] == int(base) + ROLES.index(role)
        annotations = deployment["template"]["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == str(ports["metrics"])
        for name in ("livenessProbe", "readinessProbe"):
            if name in container:
                probe = container[name]["httpGet"]
                assert probe["port"] in ports
                assert probe["path"] in paths | {"/metrics"}
        assert deployment["selector"]["matchLabels"].items() <= labels(deployment).items()
        assert pod["terminationGracePeriodSeconds"] > _PATIENCE_S
        volumes = {each["name"] for each in pod["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} == volumes


def labels(deployment: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = deployment["template"]["metadata"]["labels"]
    return found


def test_the_service_finds_the_pods_that_serve() -> None:
    (service,) = [each for each in manifests() if each["kind"] == "Service"]
    found = [
        role
        for role, each in deployments().items()
        if service["spec"]["selector"].items() <= labels(each).items()
    ]
    assert found == ["serve"]
    (port,) = service["spec"]["ports"]
    (container,) = deployments()["serve"]["template"]["spec"]["containers"]
    assert port["targetPort"] in {each["name"] for each in container["ports"]}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_runs_a_command_and_is_not_restarted_in_vain(unit: Path) -> None:
    parsed = ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(unit)
    assert set(parsed) == {"DEFAULT", "Unit", "Service", "Install"}
    service = parsed["Service"]
    program, *arguments = service["ExecStart"].split()
    assert program.endswith("/bin/everstate")
    check_command(arguments)
    final = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert final == (_FINAL if arguments == ["run"] else {InvalidConfig.exit_code})
    assert int(service["TimeoutStopSec"]) > _PATIENCE_S
    set_here = re.findall(r"^Environment=(\w+)=", unit.read_text("utf-8"), re.MULTILINE)
    assert len(set_here) == 2
    assert unknown_settings(set_here) == []


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Instructions of a Dockerfile, with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def test_the_image_is_made_of_files_that_exist_and_runs_as_nobody_special() -> None:
    found = list(instructions((DEPLOY / "Dockerfile").read_text("utf-8")))
    named = {name for name, _ in found}
    assert named == {
        *("FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "ENTRYPOINT", "CMD")
    }
    for name, rest in found:
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
        if name == "FROM":
            assert rest.startswith("python:3.11")
    (variables,) = [rest for name, rest in found if name == "ENV"]
    assert unknown_settings(re.findall(r"(\w+)=", variables)) == []
    (user,) = [rest for name, rest in found if name == "USER"]
    for each in deployments().values():
        assert each["template"]["spec"]["securityContext"]["runAsUser"] == int(user) > 0
    (scripts,) = [
        re.findall(r'python -c "([^"]+)"', rest) for name, rest in found[-9:] if name == "RUN"
    ]
    for script in scripts:
        compile(script, "Dockerfile", "exec")


def test_a_setting_that_is_none_is_noticed() -> None:
    assert unknown_settings(["EVERSTATE_METRICS_PORT", "EVERSTATE_METRICS_PROT", "PATH"]) == [
        "EVERSTATE_METRICS_PROT"
    ]
    with pytest.raises(Exception, match="No such option"):
        check_command(["serve", "--prot", "8080"])
    with pytest.raises(Exception, match="is not one of"):
        check_command(["run", "--only", "relais"])
