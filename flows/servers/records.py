"""Read and correct the records of a Prefect server over HTTP."""

from __future__ import annotations

import time
from typing import Any

from flows.servers.api import Api

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
PAGE = 200
POLL_S = 0.15


def settle(api: Api, since: str, limit_s: float) -> bool:
    """Wait until the server has recorded all task runs of the flow runs that ended since a time.

    Task run states are sent as events, which the server writes a moment later than the state of the
    flow run. They count as recorded once all of them are final and two requests in a row return the
    same states. Returns True if everything was recorded in time.
    """
    deadline = time.monotonic() + limit_s
    ended = {"start_time": {"after_": since}, "state": {"type": {"any_": sorted(FINAL)}}}
    ids = [run["id"] for run in api.post("/flow_runs/filter", {"flow_runs": ended})]
    wanted = {"flow_runs": {"id": {"any_": ids}}, "limit": PAGE}
    before: dict[str, str] | None = None
    while ids and time.monotonic() < deadline:
        runs = api.post("/task_runs/filter", wanted)
        states = {run["id"]: run["state_type"] for run in runs}
        if states == before and set(states.values()) <= FINAL:
            return True
        before = states
        time.sleep(POLL_S)
    return not ids


def bury_the_dead(api: Api, *, of_deployments: bool = False) -> int:
    """Mark unfinished runs as crashed: their process is gone (`kill -9`, power cut).

    Call it only while no other process can have such a flow run on this server. Returns the number
    of flow runs.
    """
    unfinished = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    crashed = {"type": "CRASHED", "name": "Crashed", "message": "its process is gone"}
    started = {**unfinished, "deployment_id": {"is_null_": False}} if of_deployments else unfinished
    dead = [run["id"] for run in api.post("/flow_runs/filter", {"flow_runs": started})]
    tasks: dict[str, Any] = {"task_runs": unfinished, "flow_runs": {"id": {"any_": dead}}}
    dead_tasks = [run["id"] for run in api.post("/task_runs/filter", tasks)]
    for kind, ids in (("flow_runs", dead), ("task_runs", dead_tasks)):
        for each in ids:
            api.post(f"/{kind}/{each}/set_state", {"state": crashed, "force": True})
    return len(dead)
