"""The files of deploy/, as the programs that use them read them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
USER = 10001
KINDS = {"edge": "Deployment", "origin": "StatefulSet"}


class Process(NamedTuple):
    """A process that a file of deploy/ starts; `stop_s` is the time that it has to end."""

    where: str
    command: list[str]
    environment: dict[str, str]
    ports: set[tuple[int, str]]
    """The ports that are published or declared, each with `tcp` or `udp`."""
    stop_s: float | None


# ---- images ----


def dockerfile(name: str) -> list[tuple[str, str]]:
    """Return (instruction, rest) of each line, continued ones joined."""
    text = (DEPLOY / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pairs = (line.split(None, 1) for line in lines)
    return [(first, " ".join(rest.split())) for first, rest in pairs]


def image(name: str) -> Process:
    last = dict(dockerfile(name))
    command = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    environment = dict(pair.split("=", 1) for pair in shlex.split(last["ENV"]))
    ports = {_port(each) for each in last["EXPOSE"].split()}
    return Process(f"{name}.Dockerfile", command, environment, ports, None)


def _port(text: str) -> tuple[int, str]:
    number, _, protocol = text.partition("/")
    return int(number), protocol or "tcp"


# ---- Compose ----


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """Return a Compose value with `${NAME}`, `${NAME:-default}` and `${NAME:?message}` filled in.

    Raises KeyError with the message where a variable is needed and not given.
    """
    if isinstance(value, dict):
        return {key: interpolated(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, variables) for each in value]
    if not isinstance(value, str):
        return value

    def fill(found: re.Match[str]) -> str:
        name, kind, rest = found["name"], found["kind"], found["rest"]
        if found["name"] is None:
            return "$"
        if variables.get(name):
            return variables[name]
        if kind == ":?":
            raise KeyError(rest)
        return rest or ""

    pattern = r"\$(?:\$|\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\})"
    return re.sub(pattern, fill, value)


def merged(base: Any, over: Any) -> Any:
    """Merge two Compose values: mappings by key, sequences one after the other, else `over`."""
    if isinstance(base, dict) and isinstance(over, dict):
        both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys()}
        return base | over | both
    if isinstance(base, list) and isinstance(over, list):
        return [*base, *(each for each in over if each not in base)]
    return over


def compose(*overrides: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return compose.yaml with compose.NAME.yaml of each override, as `docker compose` merges them.

    A command replaces a command, and a variable without a value is the one of the shell.
    """
    given = variables or {}
    whole: dict[str, Any] = {}
    for name in ("compose.yaml", *(f"compose.{name}.yaml" for name in overrides)):
        over = interpolated(yaml.safe_load((DEPLOY / name).read_text()), given)
        commands = {n: s["command"] for n, s in over["services"].items() if "command" in s}
        whole = merged(whole, over)
        for service, command in commands.items():
            whole["services"][service]["command"] = command
    for service in whole["services"].values():
        environment = service.get("environment", {})
        passed = {name: given[name] for name in environment if name in given}
        said = {name: value for name, value in environment.items() if value is not None}
        service["environment"] = {name: str(value) for name, value in (said | passed).items()}
    return whole


def service(name: str, whole: dict[str, Any] | None = None) -> Process:
    """Return the process of one of our own services of Compose."""
    found = (whole or compose())["services"][name]
    base = image(Path(found["build"]["dockerfile"]).name.removesuffix(".Dockerfile"))
    command = [base.command[0], *found.get("command", base.command[1:])]
    ports = set()
    for each in found.get("ports", []):
        outside, inside = each.split(":")[-2:]
        assert outside == inside.partition("/")[0], "Alt-Svc says the port that the edge listens on"
        ports.add(_port(inside))
    environment = base.environment | found["environment"]
    stop_s = float(found["stop_grace_period"].removesuffix("s"))
    return Process(f"compose {name}", command, environment, ports, stop_s)


# ---- Kubernetes ----


def manifests(folder: str = "base") -> list[dict[str, Any]]:
    """Return the objects of a folder of deploy/kubernetes, without kustomize's own."""
    files = [file for file in sorted((KUBERNETES / folder).iterdir()) if file.suffix == ".yaml"]
    documents = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    return [each for each in documents if "kustomize" not in each.get("apiVersion", "kustomize")]


def manifest(kind: str, name: str, folder: str = "base") -> dict[str, Any]:
    [found] = [
        each
        for each in manifests(folder)
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


def pod(name: str, folder: str = "base") -> dict[str, Any]:
    whole = manifest(KINDS[name], f"tailrace-{name}", folder)
    spec: dict[str, Any] = whole["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    [found] = pod(name)["containers"]
    result: dict[str, Any] = found
    return result


def pod_labels(name: str) -> dict[str, str]:
    spec = manifest(KINDS[name], f"tailrace-{name}")["spec"]
    labels: dict[str, str] = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    return labels


def in_pod(name: str) -> Process:
    spec, base, ours = pod(name), image(name), container(name)
    secrets = {each["name"]: "of-a-secret-16-characters" for each in ours["env"]}
    said = {each["name"]: each["value"] for each in ours["env"] if "value" in each}
    ports = {(each["containerPort"], each.get("protocol", "TCP").lower()) for each in ours["ports"]}
    command = [base.command[0], *ours.get("args", base.command[1:])]
    stop_s = float(spec["terminationGracePeriodSeconds"])
    environment = base.environment | secrets | said
    return Process(f"kubernetes {name}", command, environment, ports, stop_s)


# ---- systemd ----


def unit(name: str, file: str = "tailrace-{}.service") -> dict[str, dict[str, list[str]]]:
    """Return the values of each setting of a unit, by section; systemd repeats settings."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in (DEPLOY / file.format(name)).read_text().splitlines():
        if found := re.fullmatch(r"\[(\w+)\]", line):
            section = sections.setdefault(found[1], {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return sections


def by_systemd(name: str) -> Process:
    settings = unit(name)["Service"]
    environment = dict(value.split("=", 1) for value in settings["Environment"])
    [started], [stop_s] = settings["ExecStart"], settings["TimeoutStopSec"]
    command = shlex.split(started)
    assert command[0] == "/opt/tailrace/bin/tailrace"
    return Process(f"{name}.service", command, environment, set(), float(stop_s))


# ---- the guide ----


def blocks(language: str) -> list[str]:
    """Return the blocks of docs/deploy.md in a language, without the indent of a list."""
    text = (ROOT / "docs/deploy.md").read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]
