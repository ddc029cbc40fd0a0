"""Bills of materials: exactly what the locks hold, in CycloneDX's own schema."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from infra import sbom
from tests.infra.requirements_files import REQUIREMENTS, lock, logical_lines, normal


@pytest.fixture(scope="module", params=sbom.PROFILES)
def profile(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, json.loads(sbom.make(request.param))


def test_it_lists_what_the_locks_list_and_nothing_else(
    profile: tuple[str, dict[str, Any]],
) -> None:
    name, document = profile
    listed = [(normal(each["name"]), each["version"]) for each in document["components"]]
    wanted = {item for part in sbom.PROFILES[name] for item in lock(part).items()}
    assert sorted(listed) == sorted(wanted)
    (graph,) = [each for each in document["dependencies"] if each["ref"] == f"plumbline-{name}"]
    assert set(graph["dependsOn"]) == {each["bom-ref"] for each in document["components"]}


def test_it_has_the_hashes_of_the_locks(profile: tuple[str, dict[str, Any]]) -> None:
    name, document = profile
    wanted = {
        line.split()[0]: {word.strip() for word in line.split("--hash=sha256:")[1:]}
        for part in sbom.PROFILES[name]
        for line in logical_lines(REQUIREMENTS / f"{part}.lock")
    }
    for component in document["components"]:
        (files,) = component["externalReferences"]
        hashes = {each["content"] for each in files["hashes"] if each["alg"] == "SHA-256"}
        assert hashes == wanted[f"{component['name']}=={component['version']}"], component["name"]


def test_it_follows_the_schema(profile: tuple[str, dict[str, Any]]) -> None:
    _, document = profile
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    text = json.dumps(document)
    assert validator.validate_str(text) is None
    damaged = json.loads(text)
    del damaged["components"][0]["name"]
    assert validator.validate_str(json.dumps(damaged)) is not None


def test_licences_are_those_of_the_version_that_is_installed() -> None:
    components = {each["name"]: each for each in json.loads(sbom.make("cpu"))["components"]}
    assert components["requests"]["licenses"][0]["license"]["id"] == "Apache-2.0"
    known = [each for each in components.values() if "licenses" in each]
    assert len(known) > 0.9 * len(components)
    assert version("requests") == components["requests"]["version"]
    assert not sbom.component_of(f"requests==0.0.1 --hash=sha256:{'0' * 64}").licenses


def test_the_same_locks_have_the_same_number() -> None:
    first, second = (json.loads(sbom.make("sign")) for _ in range(2))
    assert first["serialNumber"] == second["serialNumber"]
    assert first["serialNumber"] != json.loads(sbom.make("server"))["serialNumber"]


def test_an_unknown_profile_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert sbom.main(["gpu"]) == 2
    assert "no profile gpu; one of cpu, cuda, server, sign" in capsys.readouterr().err
