"""The files of deploy/ and docs/deploy.md, held to the code. No container engine runs here."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from starlette.routing import Route
from typer.testing import CliRunner

from tailrace.cli import app
from tailrace.edge.app import create_app
from tailrace.edge.config import EdgeConfig
from tailrace.edge.origins.link import Link
from tailrace.edge.serve import GRACEFUL_TIMEOUT_S
from tailrace.ledger.settings import Settings, parse_address
from tailrace.origin.config import LedgerConfig, OriginConfig, StreamsConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PARTS: list[type[Settings]] = [EdgeConfig, OriginConfig, LedgerConfig, StreamsConfig]
VARIABLES = {
    f"{part.model_config['env_prefix']}{name}".upper(): (part, name)
    for part in PARTS
    for name in part.model_fields
}
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = [
    document
    for file in sorted((DEPLOY / "kubernetes").iterdir())
    for document in yaml.safe_load_all(file.read_text())
]
USER = 10001


class Process(NamedTuple):
    """One process that something in deploy/ starts; `stop_s` is how long it may take to end."""

    where: str
    command: list[str]
    environment: dict[str, str]
    ports: set[int]
    stop_s: float | None


def dockerfile(name: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each line, continued ones joined."""
    text = (DEPLOY / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pairs = (line.split(None, 1) for line in lines)
    return [(first, " ".join(rest.split())) for first, rest in pairs]


def of_image(name: str) -> Process:
    last = dict(dockerfile(name))
    command = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    environment = dict(pair.split("=", 1) for pair in shlex.split(last["ENV"]))
    ports = {int(port) for port in last["EXPOSE"].split()}
    return Process(f"{name}.Dockerfile", command, environment, ports, None)


def of_compose(name: str) -> Process:
    service, image = COMPOSE["services"][name], of_image(name)
    ports = {int(each.rpartition(":")[2]) for each in service.get("ports", [])}
    environment = image.environment | service["environment"]
    stop_s = float(service["stop_grace_period"].removesuffix("s"))
    return Process(f"compose {name}", image.command, environment, ports, stop_s)


def manifest(kind: str, name: str) -> dict[str, Any]:
    [found] = [m for m in MANIFESTS if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    result: dict[str, Any] = found
    return result


def pod(name: str) -> dict[str, Any]:
    kind = "Deployment" if name == "edge" else "StatefulSet"
    spec: dict[str, Any] = manifest(kind, f"tailrace-{name}")["spec"]["template"]["spec"]
    return spec


def of_kubernetes(name: str) -> Process:
    spec, image = pod(name), of_image(name)
    [container] = spec["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    ports = {each["containerPort"] for each in container["ports"]}
    stop_s = float(spec["terminationGracePeriodSeconds"])
    command = [image.command[0], *container["args"]]
    return Process(f"kubernetes {name}", command, image.environment | environment, ports, stop_s)


def of_systemd(name: str) -> Process:
    service = unit(name)
    environment = dict(value.split("=", 1) for value in service["Environment"].split("\n"))
    command = shlex.split(service["ExecStart"])
    assert command[0] == "/opt/tailrace/bin/tailrace"
    return Process(f"{name}.service", command, environment, set(), float(service["TimeoutStopSec"]))


class Repeatable(dict[str, Any]):
    """systemd's files say a name several times."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, list) and key in self:
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def unit(name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(dict_type=Repeatable, strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read(DEPLOY / f"tailrace-{name}.service")
    assert parser.sections() == ["Unit", "Service", "Install"]
    return parser["Service"]


PROCESSES = [
    of(name)
    for of in (of_image, of_compose, of_kubernetes, of_systemd)
    for name in ("edge", "origin")
]


def check_command(command: list[str]) -> None:
    """Help is only given for a command that is there, with options that it has."""
    result = CliRunner().invoke(app, [*command[1:], "--help"])
    assert result.exit_code == 0 and "Usage:" in result.stdout, (command, result.output)


def settings(process: Process, part: type[Settings], patch: pytest.MonkeyPatch) -> Any:
    for name, value in process.environment.items():
        if name in VARIABLES:
            patch.setenv(name, value)
    return part.load()


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.where)
def test_commands_settings_and_ports_are_those_of_the_code(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_command(process.command)
    ours = {name for name in process.environment if name.startswith("TAILRACE_")}
    assert ours <= VARIABLES.keys()
    is_edge = process.command[1] == "edge"
    part = EdgeConfig if is_edge else OriginConfig
    assert {VARIABLES[name][0] for name in ours} == {part}
    loaded = settings(process, part, monkeypatch)
    if process.where.endswith(".service"):
        return  # listens where its settings say
    if is_edge:
        assert not loaded.listens_on_loopback_alone
        assert not loaded.allow_public_without_keys
        assert "TAILRACE_EDGE_API_KEYS" in process.environment
        addresses = [*loaded.http, *([loaded.metrics] if loaded.metrics else [])]
        listening = {parse_address(address)[1] for address in addresses}
    else:
        flags = dict(zip(process.command, process.command[1:], strict=False))
        addresses = [loaded.link, flags.get("--metrics", loaded.link)]
        listening = {parse_address(address)[1] for address in addresses}
    assert not process.ports or process.ports == listening


@pytest.mark.parametrize(
    "process", [p for p in PROCESSES if p.stop_s is not None], ids=lambda process: process.where
)
def test_nothing_is_killed_while_it_drains(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = settings(process, EdgeConfig, monkeypatch)
    assert process.stop_s is not None
    assert process.stop_s > edge.lame_duck_s + edge.drain_s + GRACEFUL_TIMEOUT_S


def test_edges_find_the_origin_and_a_service_the_edges() -> None:
    for process in (of_compose("edge"), of_kubernetes("edge")):
        host, port = parse_address(process.environment["TAILRACE_EDGE_ORIGIN"])
        assert port == 8470
        assert host in COMPOSE["services"] or manifest("Service", host)
    for name in ("edge", "origin"):
        service = manifest("Service", f"tailrace-{name}")["spec"]
        labels = pod_labels(name)
        assert service["selector"].items() <= labels.items()
        [container] = pod(name)["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert {each["targetPort"] for each in service["ports"]} <= ports.keys()
    origin = manifest("Service", "tailrace-origin")["spec"]["ports"]
    assert [each["port"] for each in origin] == [8470]


def test_links_are_for_edges_and_metrics_for_prometheus() -> None:
    monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    prometheus = [{"namespaceSelector": {"matchLabels": monitoring}}]
    edges = [{"podSelector": {"matchLabels": pod_labels("edge")}}]
    allowed = {
        "edge": {"http": None, "metrics": prometheus},
        "origin": {"link": edges, "metrics": prometheus},
    }
    for name, ports in allowed.items():
        policy = manifest("NetworkPolicy", f"tailrace-{name}")["spec"]
        assert policy["podSelector"]["matchLabels"] == pod_labels(name)
        rules = {
            port["port"]: rule.get("from") for rule in policy["ingress"] for port in rule["ports"]
        }
        assert rules == ports
        assert set(rules) == {port["name"] for port in pod(name)["containers"][0]["ports"]}


def test_prometheus_finds_the_pods_by_the_jobs_of_the_dashboard() -> None:
    prometheus = DEPLOY / "prometheus"
    here, there = (
        yaml.safe_load((prometheus / name).read_text())
        for name in ("prometheus.yaml", "kubernetes.yaml")
    )
    jobs = [job["job_name"] for job in there["scrape_configs"]]
    assert jobs == [job["job_name"] for job in here["scrape_configs"]]
    for job in there["scrape_configs"]:
        name = job["job_name"].removeprefix("tailrace-")
        keep, _ = job["relabel_configs"]
        assert keep["source_labels"] == [
            "__meta_kubernetes_pod_label_app",
            "__meta_kubernetes_pod_container_port_name",
        ]
        assert keep["regex"] == f"{pod_labels(name)['app']};metrics"
        [container] = pod(name)["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        kind = "Deployment" if name == "edge" else "StatefulSet"
        template = manifest(kind, f"tailrace-{name}")["spec"]["template"]
        told = template["metadata"]["annotations"]
        assert told == {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(ports["metrics"]),
        }


def test_no_service_sets_variables_that_look_like_settings() -> None:
    assert all(pod(name)["enableServiceLinks"] is False for name in ("edge", "origin"))


def pod_labels(name: str) -> dict[str, str]:
    kind = "Deployment" if name == "edge" else "StatefulSet"
    spec = manifest(kind, f"tailrace-{name}")["spec"]
    labels: dict[str, str] = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    return labels


def test_probes_ask_what_an_edge_answers() -> None:
    routes = create_app(Link(("127.0.0.1", 9)), EdgeConfig()).routes
    paths = {route.path for route in routes if isinstance(route, Route)}
    [container] = pod("edge")["containers"]
    probes = {name: container[name]["httpGet"] for name in ("readinessProbe", "livenessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }
    asked = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", str(COMPOSE["services"]["edge"]))
    assert asked == [("8080", "/healthz")]
    assert {"/readyz", "/healthz"} <= paths
    ports = {each["name"] for each in container["ports"]}
    assert {probe["port"] for probe in probes.values()} <= ports
    # Load balancers have heard of it before anything is refused.
    probe = container["readinessProbe"]
    environment = of_kubernetes("edge").environment
    heard_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert float(environment["TAILRACE_EDGE_LAME_DUCK_S"]) > heard_s


def test_keys_and_data_lie_where_something_is_mounted() -> None:
    edge, origin = COMPOSE["services"]["edge"], COMPOSE["services"]["origin"]
    mounts = {each.split(":")[1] for each in (*edge["volumes"], *origin["volumes"])}
    mounted = {
        mount["mountPath"]
        for name in ("edge", "origin")
        for mount in pod(name)["containers"][0]["volumeMounts"]
    }
    for places in (mounts, mounted):
        assert str(Path(of_compose("edge").environment["TAILRACE_EDGE_API_KEYS"]).parent) in places
        assert of_compose("origin").environment["TAILRACE_ORIGIN_DATA"] in places
    assert {each.split(":")[0] for each in (*edge["volumes"], *origin["volumes"])} == {
        *COMPOSE["volumes"]
    }
    for name in ("edge", "origin"):
        service = unit(name)
        keys = of_systemd(name).environment
        assert all(
            value.startswith(f"/var/lib/{service['StateDirectory']}")
            for variable, value in keys.items()
            if value.startswith("/")
        )
        assert pod(name)["securityContext"]["runAsUser"] == USER
        instructions = dockerfile(name)
        assert ("USER", str(USER)) in instructions
        assert f"--uid {USER}" in dict(instructions)["RUN"]


def test_images_install_the_extra_of_their_part_and_an_edge_no_other() -> None:
    for name, what in (("edge", "/src"), ("origin", "'/src[torch,postgres]'")):
        [installed] = [rest for first, rest in dockerfile(name) if "pip install" in rest]
        assert (
            f"constraints.txt {what} " in f"{installed} " and "-c /src/constraints.txt" in installed
        )
    context = (ROOT / ".dockerignore").read_text().splitlines()
    needed = {line.removeprefix("!") for line in context if line.startswith("!")}
    packages = {"edge", "kernels", "ledger", "origin", "tailrace"}
    assert packages | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} == needed
    assert all((ROOT / name).exists() for name in needed)


def test_sighup_and_open_files_are_known_to_systemd() -> None:
    edge = unit("edge")
    assert edge["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert int(edge["LimitNOFILE"]) > EdgeConfig().max_connections
    assert COMPOSE["services"]["edge"]["ulimits"]["nofile"] > EdgeConfig().max_connections


def commands(text: str) -> Iterator[list[str]]:
    """What the guide has a reader type that is ours."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line.partition(" | ")[0])
            if "edge" in words and "run" in words:  # compose run … edge WORDS
                yield ["tailrace", *words[words.index("edge") + 1 :]]
            else:
                at = [
                    n for n, word in enumerate(words) if re.fullmatch(r"(/.+/bin/)?tailrace", word)
                ]
                if at and words[-1] != "tailrace" and words[0] in (words[at[-1]], "sudo"):
                    yield words[at[-1] :]


def test_the_guide_has_commands_that_there_are() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    found = list(commands(text))
    assert len(found) >= 7
    for command in found:
        check_command(command)
    told = set(re.findall(r"TAILRACE_[A-Z_]+[A-Z]", text))
    assert told <= VARIABLES.keys()
