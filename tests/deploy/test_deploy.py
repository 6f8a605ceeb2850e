"""The files of deploy/ and docs/deploy.md, held to the code. No container engine runs here."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from typer.testing import CliRunner

from tailrace.cli import app
from tailrace.edge.access.operators import KEY_HINT
from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig, connection_limits
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.serve import GRACEFUL_TIMEOUT_S
from tailrace.edge.telemetry.metrics import EdgeMetrics
from tailrace.edge.telemetry.request_metrics import Counts
from tailrace.ledger.process.settings import Settings, parse_address
from tailrace.origin.config import LedgerConfig, OriginConfig, StreamsConfig
from tests.deploy.files import (
    DEPLOY,
    KINDS,
    KUBERNETES,
    ROOT,
    USER,
    Process,
    blocks,
    by_systemd,
    compose,
    container,
    dockerfile,
    image,
    in_pod,
    manifest,
    pod,
    pod_labels,
    service,
    unit,
)

PARTS: list[type[Settings]] = [EdgeConfig, OriginConfig, LedgerConfig, StreamsConfig]
VARIABLES = {
    f"{part.model_config['env_prefix']}{name}".upper(): (part, name)
    for part in PARTS
    for name in part.model_fields
}
HTTPS = {(443, "tcp"), (443, "udp")}
PROCESSES = [
    read(name) for read in (image, service, in_pod, by_systemd) for name in ("edge", "origin")
]
UPSTREAM = {"UPSTREAM_URL": "http://upstream:8000/v1"}
MODEL = {"MODEL_FOLDER": "/srv/model", "MODEL_NAME": "llama"}


def check_command(command: list[str]) -> None:
    """Help is only given for a command that is there, with options that it has."""
    result = CliRunner().invoke(app, [*command[1:], "--help"])
    assert result.exit_code == 0 and "Usage:" in result.stdout, (command, result.output)


def flags(process: Process) -> dict[str, str]:
    """Return the settings that the command line gives."""
    words = process.command[2:]
    return {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(words[::2], words[1::2], strict=True)
        if name != "--config"
    }


def settings(process: Process, part: type[Settings], patch: pytest.MonkeyPatch) -> Any:
    for name, value in process.environment.items():
        if name in VARIABLES:
            patch.setenv(name, value)
    given: dict[str, Any] = flags(process) if process.command[1] == part.table else {}
    return part.load(**given)


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
        assert all(address.startswith("127.0.0.1:") for address in loaded.http)
        assert loaded.http3
        listening = {
            (parse_address(address)[1], protocol)
            for address in loaded.https
            for protocol in ("tcp", "udp")
        }
        assert listening == HTTPS
    else:
        listening = {(parse_address(loaded.link)[1], "tcp")}
    if process.where.startswith("kubernetes"):
        listening.add((parse_address(loaded.metrics)[1], "tcp"))
    elif not is_edge and process.where.startswith("compose"):
        listening = set()  # nothing of it is published
    assert process.ports == listening


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
    for process in (service("edge"), in_pod("edge")):
        host, port = parse_address(process.environment["TAILRACE_EDGE_ORIGIN"])
        assert port == 8470
        assert host in compose()["services"] or manifest("Service", host)
    for name in KINDS:
        spec = manifest("Service", f"tailrace-{name}")["spec"]
        assert spec["selector"].items() <= pod_labels(name).items()
        inside = {each["name"]: each for each in container(name)["ports"]}
        for each in spec["ports"]:
            target = inside[each["targetPort"]]
            assert (target["containerPort"], target["protocol"]) == (each["port"], each["protocol"])
    ports = manifest("Service", "tailrace-edge")["spec"]["ports"]
    assert {(each["port"], each["protocol"].lower()) for each in ports} == HTTPS
    [port] = manifest("Service", "tailrace-origin")["spec"]["ports"]
    assert port["port"] == 8470
    # Both sides of the link have the same secret.
    secrets = [
        each["valueFrom"]
        for name in KINDS
        for each in container(name)["env"]
        if each["name"] in ("TAILRACE_EDGE_ORIGIN_SECRET", "TAILRACE_ORIGIN_LINK_SECRET")
    ]
    assert secrets == [{"secretKeyRef": {"name": "tailrace-link", "key": "secret"}}] * 2


def test_links_are_for_edges_and_metrics_for_prometheus() -> None:
    monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    prometheus = [{"namespaceSelector": {"matchLabels": monitoring}}]
    edges = [{"podSelector": {"matchLabels": pod_labels("edge")}}]
    allowed = {
        "edge": {"https": None, "h3": None, "metrics": prometheus},
        "origin": {"link": edges, "metrics": prometheus},
    }
    for name, ports in allowed.items():
        policy = manifest("NetworkPolicy", f"tailrace-{name}")["spec"]
        assert policy["podSelector"]["matchLabels"] == pod_labels(name)
        rules = {
            port["port"]: rule.get("from") for rule in policy["ingress"] for port in rule["ports"]
        }
        assert rules == ports
        protocols = {
            port["port"]: port["protocol"] for rule in policy["ingress"] for port in rule["ports"]
        }
        assert protocols == {
            port["name"]: port.get("protocol", "TCP") for port in container(name)["ports"]
        }


def test_prometheus_finds_the_processes_by_the_jobs_of_the_dashboard() -> None:
    prometheus = DEPLOY / "prometheus"
    here, there, composed = (
        yaml.safe_load((prometheus / name).read_text())["scrape_configs"]
        for name in ("prometheus.yaml", "kubernetes.yaml", "compose.yaml")
    )
    jobs = [job["job_name"] for job in there]
    assert jobs == [job["job_name"] for job in here] == [job["job_name"] for job in composed]
    for job in there:
        name = job["job_name"].removeprefix("tailrace-")
        keep, *labels = job["relabel_configs"]
        assert keep["source_labels"] == [
            "__meta_kubernetes_pod_label_app",
            "__meta_kubernetes_pod_container_port_name",
        ]
        assert keep["regex"] == f"{pod_labels(name)['app']};metrics"
        assert [each["target_label"] for each in labels] == ["namespace", "pod"]
        ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
        template = manifest(KINDS[name], f"tailrace-{name}")["spec"]["template"]
        assert template["metadata"]["annotations"] == {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(ports["metrics"]),
        }
    for job in composed:
        [config] = job["static_configs"]
        name = job["job_name"].removeprefix("tailrace-")
        told = service(name).environment[f"TAILRACE_{name.upper()}_METRICS"]
        assert config["targets"] == [f"{name}:{parse_address(told)[1]}"]


def test_the_number_of_edges_follows_metrics_that_they_export() -> None:
    scaler = manifest("HorizontalPodAutoscaler", "tailrace-edge", "autoscale")["spec"]
    target = scaler["scaleTargetRef"]
    assert manifest(target["kind"], target["name"])
    [of_pods] = [each["pods"] for each in scaler["metrics"] if each["type"] == "Pods"]
    name = of_pods["metric"]["name"]
    adapter = yaml.safe_load((KUBERNETES / "autoscale/prometheus-adapter.yaml").read_text())
    [rule] = adapter["rules"]["custom"]
    assert rule["seriesQuery"].startswith(f"{name}{{")
    assert name in exported()
    assert int(of_pods["target"]["averageValue"].replace("k", "000")) < EdgeConfig().max_connections
    [cpu] = [each["resource"] for each in scaler["metrics"] if each["type"] == "Resource"]
    assert cpu["name"] in container("edge")["resources"]["requests"]


def exported() -> set[str]:
    """Return the names of the metrics that an edge exports."""
    link = OriginPool(("127.0.0.1", 9))
    limits = connection_limits(EdgeConfig(), 1024)
    registry: CollectorRegistry = EdgeMetrics(Counts(), link, limits).registry
    return {metric.name for metric in registry.collect()}


def test_no_service_sets_variables_that_look_like_settings() -> None:
    assert all(pod(name)["enableServiceLinks"] is False for name in KINDS)


def test_probes_ask_what_an_edge_answers() -> None:
    routes = create_app(OriginPool(("127.0.0.1", 9)), EdgeConfig()).routes
    paths = {route.path for route in routes if isinstance(route, Route)}
    probes = {
        name: container("edge")[name]["httpGet"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/healthz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }
    assert {"/readyz", "/healthz"} <= paths
    ports = {each["name"]: each["containerPort"] for each in container("edge")["ports"]}
    assert {(ports[probe["port"]], probe["scheme"]) for probe in probes.values()} == {
        (443, "HTTPS")
    }
    # Load balancers have heard of it before anything is refused.
    probe = container("edge")["readinessProbe"]
    heard_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert float(in_pod("edge").environment["TAILRACE_EDGE_LAME_DUCK_S"]) > heard_s


def test_files_lie_where_something_is_mounted() -> None:
    services = compose()["services"]
    mounts = {
        name: {each.split(":")[1]: each.split(":")[0] for each in found["volumes"]}
        for name, found in services.items()
    }
    mounted = {
        name: {each["mountPath"] for each in container(name)["volumeMounts"]} for name in KINDS
    }
    data = service("origin").environment["TAILRACE_ORIGIN_DATA"]
    for places in (mounts, mounted):
        assert {"/keys", "/tls"} == {*places["edge"]} and data in places["origin"]
    for process in (service("edge"), in_pod("edge")):
        assert process.environment["TAILRACE_EDGE_API_KEYS"] == "/keys/api-keys.json"
        named = flags(process)
        assert (named["certificate"], named["key"]) == ("/tls/tls.crt", "/tls/tls.key")
    # The edge reads what certbot's hook writes; port 80 serves certbot's challenges.
    assert mounts["certbot"]["/tls"] == mounts["edge"]["/tls"]
    assert mounts["certbot"]["/webroot"] == mounts["port-80"]["/webroot"]
    named_volumes = {
        source for each in mounts.values() for source in each.values() if source[0] not in "./"
    }
    assert named_volumes == compose()["volumes"].keys()
    files = {source for each in mounts.values() for source in each.values() if source[0] == "."}
    assert all((DEPLOY / file).exists() for file in files)
    # Each mount of a secret is without subPath: the kubelet would not bring changes.
    assert not any("subPath" in each for each in container("edge")["volumeMounts"])
    volumes = {each["name"]: each["secret"]["secretName"] for each in pod("edge")["volumes"]}
    assert volumes == {"keys": "tailrace-api-keys", "tls": "tailrace-tls"}


def test_processes_run_as_the_user_who_may_read_the_files() -> None:
    for name in KINDS:
        [state] = unit(name)["Service"]["StateDirectory"]
        assert all(
            value.startswith(f"/var/lib/{state}")
            for value in by_systemd(name).environment.values()
            if value.startswith("/")
        )
        context = pod(name)["securityContext"]
        assert {context[each] for each in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
        assert ("USER", str(USER)) in dockerfile(name)
        assert any(f"--uid {USER}" in rest for _, rest in dockerfile(name))
    hook = (DEPLOY / "certificate-to-edge.sh").read_text()
    assert f"TLS_OWNER:-{USER}" in hook


def test_port_443_needs_no_root() -> None:
    sysctl = "net.ipv4.ip_unprivileged_port_start"
    assert int(compose()["services"]["edge"]["sysctls"][sysctl]) <= 443
    [said] = pod("edge")["securityContext"]["sysctls"]
    assert said["name"] == sysctl and int(said["value"]) <= 443
    assert unit("edge")["Service"]["AmbientCapabilities"] == ["CAP_NET_BIND_SERVICE"]
    for name in KINDS:
        assert container(name)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_images_install_the_extra_of_their_part_and_an_edge_no_other() -> None:
    for name, what in (("edge", "/src"), ("origin", '"/src[${EXTRAS}]"')):
        [installed] = [rest for first, rest in dockerfile(name) if "pip install" in rest]
        assert f"-c /src/constraints.txt {what} " in f"{installed} "
    assert ("ARG", "EXTRAS=torch,postgres") in dockerfile("origin"), "a CPU needs no Triton"
    context = (ROOT / ".dockerignore").read_text().splitlines()
    needed = {line.removeprefix("!") for line in context if line.startswith("!")}
    packages = {"edge", "kernels", "ledger", "origin", "tailrace"}
    assert packages | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} == needed
    assert all((ROOT / name).exists() for name in needed)


def test_the_image_for_models_can_compile_what_triton_needs() -> None:
    last_stage = dockerfile("origin")[
        [first for first, _ in dockerfile("origin")].index("COPY") + 2 :
    ]
    [run] = [rest for first, rest in last_stage if "apt-get" in rest]
    assert "gcc libc6-dev" in run and "-include Python.h" in run
    assert "apt-get" not in str(dockerfile("edge"))


def test_overrides_change_what_the_origin_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variables in (("upstream", UPSTREAM), ("model", MODEL)):
        with pytest.raises(KeyError):
            compose(name)
        with monkeypatch.context() as patch:
            whole = compose(name, variables=variables)
            loaded = settings(service("origin", whole), OriginConfig, patch)
            if name == "upstream":
                assert loaded.upstream == UPSTREAM["UPSTREAM_URL"]
                origin = whole["services"]["origin"]
                assert loaded.upstream_key_env in origin["environment"]
                assert origin["networks"] == ["link", "outside"]
                assert service("origin", whole).command == ["tailrace", "origin"]
                assert origin["image"] == whole["services"]["edge"]["image"]
            else:
                assert (str(loaded.model), loaded.served_name) == ("/model", "llama")
                assert "/srv/model:/model:ro" in whole["services"]["origin"]["volumes"]
    gpu = compose("gpu")["services"]["origin"]
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert gpu["environment"]["TAILRACE_ORIGIN_DEVICE"] == "cuda"
    [patched] = pod("origin", "gpu")["containers"]
    assert patched["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert {each["name"] for each in patched["env"]} <= VARIABLES.keys()


def test_sighup_and_open_files_are_known_to_systemd() -> None:
    edge = unit("edge")["Service"]
    assert edge["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert int(edge["LimitNOFILE"][0]) > EdgeConfig().max_connections
    assert compose()["services"]["edge"]["ulimits"]["nofile"] > EdgeConfig().max_connections


@pytest.mark.parametrize("name", KINDS)
def test_credentials_of_systemd_are_the_files_of_a_link(name: str) -> None:
    found = unit(name, "link-tls-{}.conf")["Service"]
    handed = {each.partition(":")[0] for each in found["LoadCredential"]}
    environment = dict(each.split("=", 1) for each in found["Environment"])
    assert environment.keys() <= VARIABLES.keys()
    assert {value.removeprefix("%d/") for value in environment.values()} == handed


def commands(text: str) -> Iterator[list[str]]:
    """Find the commands of ours that the guide has a reader type."""
    for line in text.splitlines():
        captured = re.match(r"[A-Z]+=\$\((.*)\)", line)
        words = shlex.split((captured[1] if captured else line).partition(" | ")[0], comments=True)
        if "run" in words and "docker" in words and "key" in words:
            yield ["tailrace", *words[words.index("key") :]]
        at = [n for n, word in enumerate(words) if re.fullmatch(r"(/.+/bin/)?tailrace", word)]
        if at and words[-1] != "tailrace" and words[0] in (words[at[-1]], "runuser", "systemd-run"):
            yield words[at[-1] :]


def test_the_guide_has_commands_that_there_are() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    found = [command for block in blocks("sh") for command in commands(block)]
    assert len(found) >= 8
    for command in found:
        check_command(command)
    told = set(re.findall(r"TAILRACE_[A-Z_]+[A-Z]", text))
    assert told <= VARIABLES.keys()


def test_the_page_on_the_console_and_the_hints_have_commands_that_there_are() -> None:
    text = (ROOT / "docs" / "console.md").read_text()
    typed = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    found = [*commands("\n".join(typed)), *commands(KEY_HINT.partition(",")[0])]
    assert len(found) == 2
    for command in found:
        assert "--keys" in command
        check_command(command)


def test_the_commands_of_the_guide_can_be_pasted() -> None:
    found = blocks("sh")
    assert len(found) >= 12
    for block in found:
        assert "…" not in block and "..." not in block
        subprocess.run(["sh", "-n"], input=block, text=True, check=True)
        for path in re.findall(r"deploy/[\w./-]+", block):
            assert all((ROOT / part).exists() for part in path.split(":")), path
