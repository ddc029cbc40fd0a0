"""One set of running services for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.infra.servers.site import Site, deployed


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run the services, with the deployments of infra/prefect.yaml."""
    with deployed(tmp_path_factory.mktemp("site")) as site:
        yield site
