"""The files of deploy/, as the schemas and checkers of their programs see them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.files import DEPLOY, KINDS, KUBERNETES, USER, manifests
from tests.needs import needs
from tests.npm import installed

OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.26", "1.36"
"""The oldest has mixed protocols in one Service."""
HERE = Path(__file__).parent
BESIDE_PYTHON = Path(sys.executable).parent
COMPONENTS = ("gpu", "upstream", "autoscale")


def run(
    *command: object, environment: dict[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a command that must succeed; return what it wrote."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(file.name for file in DEPLOY.glob("compose*.yaml")))
def test_compose_files_fit_the_compose_specification(name: str) -> None:
    checker = BESIDE_PYTHON / "check-jsonschema"
    run(checker, "--builtin-schema", "vendor.compose-spec", DEPLOY / name)


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
@pytest.mark.parametrize("folder", ["base", *COMPONENTS])
def test_manifests_fit_the_schemas_of_kubernetes(folder: str, version: str) -> None:
    for each in manifests(folder):
        if folder != "base" and each["kind"] == "StatefulSet":
            continue  # a patch, which is looked at when it is applied
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schemas_refuse_what_is_no_field() -> None:
    [deployment] = [each for each in manifests() if each["kind"] == "Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, NEWEST_KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "components", [(), *((each,) for each in COMPONENTS), ("gpu", "autoscale")]
)
def test_kustomize_builds_a_site(components: tuple[str, ...], tmp_path: Path) -> None:
    kustomize = installed(HERE) / "kustomize"
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    site = tmp_path / "kubernetes/site/kustomization.yaml"
    told = yaml.safe_load(site.read_text())
    commented = [line[1:].strip() for line in site.read_text().splitlines() if line[:3] == "#  "]
    assert commented == [f"- ../{each}" for each in COMPONENTS]
    told["components"] = [f"../{each}" for each in components]
    site.write_text(yaml.safe_dump(told))
    objects = list(yaml.safe_load_all(run(kustomize, "build", site.parent)))
    for each in objects:
        kubernetes_validate.validate(each, NEWEST_KUBERNETES, strict=True)
    pods = {
        each["kind"]: each["spec"]["template"]["spec"]["containers"][0]
        for each in objects
        if each["kind"] in KINDS.values()
    }
    origin = pods["StatefulSet"]
    wanted = "edge" if "upstream" in components else "origin"
    assert origin["image"] == f"registry.example/tailrace-{wanted}:0.1.0"
    variables = {each["name"] for each in origin["env"]}
    assert {"TAILRACE_ORIGIN_LINK", "TAILRACE_ORIGIN_LINK_SECRET"} <= variables
    assert ("TAILRACE_ORIGIN_UPSTREAM" in variables) == ("upstream" in components)
    assert ("nvidia.com/gpu" in origin["resources"].get("limits", {})) == ("gpu" in components)
    [deployment] = [each for each in objects if each["kind"] == "Deployment"]
    assert ("replicas" in deployment["spec"]) == ("autoscale" not in components)


def test_dockerfiles_pass_hadolint() -> None:
    run(BESIDE_PYTHON / "hadolint", *sorted(DEPLOY.glob("*.Dockerfile")))


@pytest.mark.parametrize("name", KINDS)
def test_systemd_understands_the_units(name: str, tmp_path: Path) -> None:
    """Verify each unit with its drop-in; /bin/true stands for a program that is not installed."""
    if shutil.which("systemd-analyze") is None:
        needs("no systemd-analyze", "on Debian or Ubuntu: apt-get install systemd")
    unit = tmp_path / f"tailrace-{name}.service"
    text = (DEPLOY / unit.name).read_text()
    unit.write_text(text.replace("/opt/tailrace/bin/tailrace", "/bin/true"))
    folder = tmp_path / f"{unit.name}.d"
    folder.mkdir()
    shutil.copy(DEPLOY / f"link-tls-{name}.conf", folder / "link-tls.conf")
    said = run("systemd-analyze", "verify", unit)
    assert str(tmp_path) not in said, said  # warnings, such as unknown keys


def test_the_hook_of_certbot_hands_a_certificate_to_the_user_of_the_edge(tmp_path: Path) -> None:
    lineage, folder = tmp_path / "live", tmp_path / "tls"
    lineage.mkdir()
    folder.mkdir()
    for file in ("fullchain.pem", "privkey.pem"):
        (lineage / file).write_text(f"the {file}")
        (lineage / file).chmod(0o600)
    owner = str(USER if os.getuid() == 0 else os.getuid())
    told = {"RENEWED_LINEAGE": str(lineage), "TLS_FOLDER": str(folder), "TLS_OWNER": owner}
    for _ in range(2):  # a second time for a renewal, over the files of the first
        run("sh", DEPLOY / "certificate-to-edge.sh", environment=told)
    found: dict[str, Any] = {
        file.name: (file.read_text(), file.stat().st_mode & 0o777, str(file.stat().st_uid))
        for file in folder.iterdir()
    }
    assert found == {
        "tls.crt": ("the fullchain.pem", 0o400, owner),
        "tls.key": ("the privkey.pem", 0o400, owner),
    }
    assert os.access(DEPLOY / "certificate-to-edge.sh", os.X_OK)
