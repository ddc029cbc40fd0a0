"""What the embedded Prefect server has recorded, asked over its plain HTTP interface."""

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

    Task run states travel as events and are written by a service of the server a moment later than
    the flow run's own state, which is set by a plain request. Recorded means: all are final and
    two looks in a row see the same.

    Args:
        url: the API.
        since: ISO time; flow runs that started earlier are not looked at. Neither are unfinished
            ones: they are somebody else's, ours have ended.
        limit_s: give up after so many seconds.

    Returns:
        Whether everything was recorded in time.
    """
    deadline = time.monotonic() + limit_s
    ended = {"start_time": {"after_": since}, "state": {"type": {"any_": sorted(FINAL)}}}
    ours = [run["id"] for run in post(url, "/flow_runs/filter", {"flow_runs": ended})]
    if not ours:
        return True
    before: dict[str, str] | None = None
    while time.monotonic() < deadline:
        states = _task_run_states(url, ours)
        if states == before and set(states.values()) <= FINAL:
            return True
        before = states
        time.sleep(POLL_S)
    return False


def bury_the_dead(url: str) -> None:
    """Record as crashed what seems to run, although its process is gone (`kill -9`, power cut).

    Only right while no other process can have a flow run on this server.
    """
    unfinished = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    crashed = {"type": "CRASHED", "name": "Crashed", "message": "its process is gone"}
    for kind in ("flow_runs", "task_runs"):
        for run in post(url, f"/{kind}/filter", {kind: unfinished}):
            post(url, f"/{kind}/{run['id']}/set_state", {"state": crashed, "force": True})


def get(url: str, path: str) -> Any:
    """The JSON that the server answers to a GET."""
    return _answer(urllib.request.Request(url + path))


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """The JSON that the server answers to a POST of JSON."""
    headers = {"content-type": "application/json"}
    return _answer(urllib.request.Request(url + path, json.dumps(body).encode(), headers))


def _answer(request: urllib.request.Request) -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on loopback
    with direct.open(request, timeout=ANSWER_S) as answer:
        return json.load(answer)


def _task_run_states(url: str, flow_run_ids: list[str]) -> dict[str, str]:
    """State type of every task run of the flow runs, by task run id."""
    states: dict[str, str] = {}
    wanted = {"flow_runs": {"id": {"any_": flow_run_ids}}, "limit": PAGE, "sort": "ID_DESC"}
    while True:
        page = post(url, "/task_runs/filter", {**wanted, "offset": len(states)})
        states |= {run["id"]: run["state_type"] for run in page}
        if len(page) < PAGE:
            return states
