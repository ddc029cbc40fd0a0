"""The pages of Prefect and MLflow in a browser, for runs that are refused, cancelled and complete.

PLUMBLINE_PICTURES=<folder> make test-all ARGS='-k test_pages'    keeps pictures of the pages
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.servers.browser import Page, browser, find_chromium
from tests.infra.servers.site import FINAL, Site
from tests.infra.servers.test_services_end import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed"),
]
SHORT = (
    "+exp=sft_qlora", "train.max_steps=12", "train.save_steps=2", "smoke.engine=transformers",
    "smoke.min_stop_rate=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(busy_site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser that is logged in to Prefect."""
    busy_site.require("deploy")
    with browser(tmp_path_factory.mktemp("browser")) as page:
        page.log_in(address(busy_site), busy_site.services.auth)
        yield page


def address(site: Site) -> str:
    return f"http://127.0.0.1:{site.services.prefect_port}"


def flow_run_page(site: Site, run_id: str) -> str:
    return f"{address(site)}/runs/flow-run/{run_id}"


def photograph(page: Page, name: str) -> None:
    if folder := os.environ.get("PLUMBLINE_PICTURES"):
        page.photograph(Path(folder) / f"{name}.png")


def test_a_refused_configuration_shows_its_problems_and_what_to_type(
    busy_site: Site, page: Page
) -> None:
    run_id = busy_site.start_run("rlhf-qlora", ["+exp=sft_qlora", "train.lr=0", "zero.stage=4"])
    assert busy_site.finished_run(run_id)["state_type"] == "FAILED"
    text = page.open(
        flow_run_page(busy_site, run_id),
        "the preflight found 2 problems",
        "train.lr: 0; more than 0, at most 10 -> train.lr=0.0002",
        "zero.stage: 4; at least 0, at most 3 -> zero.stage=2",
        "Finished in state Failed",
    )
    photograph(page, "refused")
    assert "Traceback" not in text


def test_a_cancelled_run_and_the_one_that_goes_on(busy_site: Site, page: Page) -> None:
    """Prefect's pages say Cancelled; the pages of the run and of its records link each other."""
    runs = busy_site.services.runs
    cancelled = busy_site.start_run("rlhf-qlora", list(SHORT))
    wait_until(lambda: bool(list(runs.glob("checkpoints/*/step-*/state.json"))), 900)
    cancelling = {"type": "CANCELLING", "name": "Cancelling"}
    busy_site.services.prefect.post(f"/flow_runs/{cancelled}/set_state", {"state": cancelling})
    wait_until(lambda: busy_site.flow_run(cancelled)["state_type"] in FINAL, 120)
    text = page.open(flow_run_page(busy_site, cancelled), "3 Task runs", "\nCancelled\n")
    photograph(page, "cancelled")
    assert "Traceback" not in text

    complete = busy_site.start_run("rlhf-qlora", list(SHORT))
    wait_until(lambda: busy_site.flow_run(complete)["state_type"] in FINAL, 900)
    summary = json.loads((runs / "latest" / "summary.json").read_text())
    assert summary["pages"]["prefect"] == flow_run_page(busy_site, complete)
    page.open(summary["pages"]["prefect"], "8 Task runs", "\nCompleted\n")
    time.sleep(5)  # the graph moves to its place
    photograph(page, "complete")
    records = summary["pages"]["mlflow"]
    page.open(records, "sft_qlora sft toy", "Finished", "rlhf.py", "toy (", "system/", "@candidate")
    photograph(page, "records")
    links = page.evaluate("[...document.querySelectorAll('a')].map(link => link.href)")
    assert summary["pages"]["prefect"] in links
    others = ("http://127.0.0.1:", "https://www.mlflow.org/", "https://mlflow.org/")
    assert [link for link in links if link and not link.startswith(others)] == []
