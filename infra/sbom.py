"""Write a bill of materials (CycloneDX 1.6, JSON) for each profile: `make sbom` (ARGS: only these).

    sbom/cpu.cdx.json       what `make setup` installs
    sbom/cuda.cdx.json      what `make setup PROFILE=cuda` installs
    sbom/server.cdx.json    Python packages of the servers' image
    sbom/sign.cdx.json      what `make setup-sign` adds
    sbom/quantize.cdx.json  what `make setup-quantize` adds

Packages, versions and hashes are those of the locks. A lock names no licences: they come from the
metadata of the same version where it is installed, and are left out elsewhere.
"""

from __future__ import annotations

import sys
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License, LicenseAcknowledgement
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1]
PROFILES: Mapping[str, tuple[str, ...]] = {
    "cpu": ("build", "torch", "cpu"),
    "cuda": ("build", "cuda"),
    "server": ("server",),
    "sign": ("sign",),
    "quantize": ("quantize",),
}
"""Locks of each profile."""
_LONGEST = 80
"""Characters; a longer `License` field holds the text of a licence, not its name."""


def make(profile: str) -> str:
    """Return the bill of materials of a profile as JSON.

    Args:
        profile: a key of `PROFILES`.
    """
    locks = [PROJECT / "requirements" / f"{name}.lock" for name in PROFILES[profile]]
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    root = Component(
        name=f"{project['name']}-{profile}",
        version=project["version"],
        type=ComponentType.APPLICATION,
        bom_ref=f"{project['name']}-{profile}",
        licenses=[LicenseFactory().make_from_string(project["license"])],
    )
    components = [component for lock in locks for component in read_lock(lock)]
    bom = Bom(components=components)
    bom.metadata.component = root
    # The same locks have the same number.
    content = b"".join(lock.read_bytes() for lock in locks)
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_OID, f"{profile} {content!r}")
    bom.register_dependency(root, components)
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    return f"{text}\n"


def read_lock(lock: Path) -> Iterator[Component]:
    """Yield a component for every package of a lock."""
    for line in lock.read_text().replace("\\\n", " ").splitlines():
        if text := line.split("#", 1)[0].strip():
            yield component_of(text)


def component_of(line: str) -> Component:
    """Return the component of a requirement like `name==1.0 ; marker --hash=sha256:...`."""
    pinned, *hashes = line.split(" --hash=sha256:")
    requirement = Requirement(pinned)
    (specifier,) = requirement.specifier
    return _component(requirement, specifier.version, [each.strip() for each in hashes])


def _component(requirement: Requirement, version: str, hashes: list[str]) -> Component:
    url = PackageURL("pypi", None, requirement.name, version)
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(url.to_string()),
        comment="every file of the release that may be installed",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=each) for each in hashes],
    )
    marker = requirement.marker
    return Component(
        name=requirement.name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=url.to_string(),
        purl=url,
        external_references=[files],
        licenses=_licences(requirement.name, version),
        properties=[Property(name="plumbline:marker", value=str(marker))] if marker else [],
    )


def _licences(name: str, version: str) -> list[License]:
    """Return the licence that the installed package declares; none if another version is there."""
    try:
        declared = metadata(name)
    except PackageNotFoundError:
        return []
    text = _licence_text(declared) if declared["Version"] == version else ""
    if not text:
        return []
    by_author = LicenseAcknowledgement.DECLARED
    return [LicenseFactory().make_from_string(text, license_acknowledgement=by_author)]


def _licence_text(declared: PackageMetadata) -> str:
    """Return the SPDX expression of a package, else its licence's name; "" if it names none."""
    if "License-Expression" in declared:
        return str(declared["License-Expression"])
    names = [
        each.rpartition(" :: ")[2]
        for each in declared.get_all("Classifier", [])
        if each.startswith("License :: ") and each.count(" :: ") > 1
    ]
    field = str(declared["License"]).strip() if "License" in declared else ""
    short = field if len(field) <= _LONGEST and "\n" not in field else ""
    return short or " AND ".join(names)


def main(profiles: list[str]) -> int:
    """Write the bills of materials. Returns the exit status."""
    unknown = [name for name in profiles if name not in PROFILES]
    if unknown:
        print(f"sbom: no profile {unknown[0]}; one of {', '.join(PROFILES)}", file=sys.stderr)
        return 2
    folder = PROJECT / "sbom"
    folder.mkdir(exist_ok=True)
    for name in profiles or PROFILES:
        (folder / f"{name}.cdx.json").write_text(make(name))
        print(f"sbom/{name}.cdx.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
