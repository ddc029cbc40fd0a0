"""Read and correct the records of the embedded Prefect server over HTTP."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
PAGE = 200
POLL_S = 0.15
ANSWER_S = 10.0


def settle(url: str, since: str, limit_s: float) -> bool:
    """Wait until the server has recorded all task runs of the finished flow runs.

    Task run states are sent as events, which the server writes a moment later than the state of the
    flow run. They count as recorded once all of them are final and two requests in a row return the
    same states.

    Args:
        url: URL of the API.
        since: ISO time. Flow runs that started earlier are ignored, and so are unfinished ones,
            which belong to other processes.
        limit_s: time limit in seconds.

    Returns:
        True if everything was recorded in time.
    """
    deadline = time.monotonic() + limit_s
    ended = {"start_time": {"after_": since}, "state": {"type": {"any_": sorted(FINAL)}}}
    ended_runs = [run["id"] for run in post(url, "/flow_runs/filter", {"flow_runs": ended})]
    if not ended_runs:
        return True
    before: dict[str, str] | None = None
    while time.monotonic() < deadline:
        states = _task_run_states(url, ended_runs)
        if states == before and set(states.values()) <= FINAL:
            return True
        before = states
        time.sleep(POLL_S)
    return False


def bury_the_dead(url: str) -> None:
    """Mark unfinished runs as crashed: their process is gone (`kill -9`, power cut).

    Call it only while no other process can have a flow run on this server.
    """
    unfinished = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    crashed = {"type": "CRASHED", "name": "Crashed", "message": "its process is gone"}
    for kind in ("flow_runs", "task_runs"):
        for run in post(url, f"/{kind}/filter", {kind: unfinished}):
            post(url, f"/{kind}/{run['id']}/set_state", {"state": crashed, "force": True})


def get(url: str, path: str) -> Any:
    """Send a GET request and return the JSON answer."""
    return _answer(urllib.request.Request(url + path))


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """Send a POST request with a JSON body and return the JSON answer."""
    headers = {"content-type": "application/json"}
    return _answer(urllib.request.Request(url + path, json.dumps(body).encode(), headers))


def _answer(request: urllib.request.Request) -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy
    with direct.open(request, timeout=ANSWER_S) as answer:
        return json.load(answer)


def _task_run_states(url: str, flow_run_ids: list[str]) -> dict[str, str]:
    """Return the state type of every task run of these flow runs, by task run id."""
    states: dict[str, str] = {}
    wanted = {"flow_runs": {"id": {"any_": flow_run_ids}}, "limit": PAGE, "sort": "ID_DESC"}
    while True:
        page = post(url, "/task_runs/filter", {**wanted, "offset": len(states)})
        states |= {run["id"]: run["state_type"] for run in page}
        if len(page) < PAGE:
            return states
