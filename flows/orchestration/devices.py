"""Let a stage have its GPUs, or the CPUs of a machine without, to itself.

Stages of other runs wait for it, and nothing else does: preparing data goes on meanwhile. Runs with
a Prefect server (`make up`, PREFECT_API_URL) queue at its global concurrency limits, one for each
device: `plumbline-<UUID of the GPU>` or `plumbline-cpu-<host>`. Each has one slot, unless the user
gives it more. A slot is a lease: if its holder is killed, the server frees it when the lease ends.
Runs without such a server queue at locks in their folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from flows.cli.composed import Composed
from flows.servers.prefect_server import is_embedded
from flows.servers.services import URL
from tasks.core import machine
from tasks.core.errors import BusyError
from tasks.pipeline import locks
from tasks.pipeline.locks import Needs, Patience

LEASE_S = 60.0
"""Prefect's shortest lease; it is renewed every 45 seconds."""
ANSWER_S = 10.0
"""Shortest time limit of taking a slot, since the server has to answer."""


def names(composed: Composed, needs: Needs) -> list[str]:
    """Return the devices that a stage of a run computes on.

    Args:
        needs: devices of the stage: none, one, those of the ranks and the servers that they start,
            or those of the serving engine.
    """
    train, rollout, smoke = (composed.settings.get(k, {}) for k in ("train", "rollout", "smoke"))
    ranks, engine = train.get("nproc", 1), smoke.get("tensor_parallel", 1)
    if rollout.get("engine") == "server":
        ranks += rollout["servers"] * rollout["tensor_parallel"]
    count = {Needs.NOTHING: 0, Needs.DEVICE: 1, Needs.RANKS: ranks, Needs.ENGINE: engine}[needs]
    if count and machine.has_gpu(train.get("device", "auto")):
        return [f"plumbline-{gpu.uuid}" for gpu in machine.gpus()[:count]]
    return [f"plumbline-cpu-{socket.gethostname()}"][:count]


@contextlib.contextmanager
def reserve(composed: Composed, needs: Needs, patience: Patience) -> Iterator[None]:
    """Wait until a stage has its devices, and keep them while the block runs.

    Raises:
        BusyError: another run still uses one of them.
    """
    wanted = names(composed, needs)
    if not wanted:
        yield
        return
    if URL not in os.environ or is_embedded():
        with locks.devices(composed.runs, wanted, patience):
            yield
        return
    with contextlib.ExitStack() as stack:
        _take_slots(stack, wanted, patience)
        yield


def _take_slots(stack: contextlib.ExitStack, wanted: Sequence[str], patience: Patience) -> None:
    """Enter the slots of the devices. Without an answer of the server the run goes on."""
    from prefect.client.orchestration import get_client
    from prefect.concurrency.sync import concurrency

    try:
        with get_client(sync_client=True) as client:
            limits = [_limit(client, name) for name in wanted]
        taken = [each.name for each in limits if each.active and each.active_slots >= each.limit]
        if taken and patience.wait_s == 0:
            raise BusyError(f"{taken[0]} is in use by another run", hint=locks.HINT)
        if taken:
            patience.say(f"waits: {taken[0]} is in use by another run")
        limit_s = None if patience.wait_s is None else max(patience.wait_s, ANSWER_S)
        slots = concurrency(
            list(wanted),
            timeout_seconds=limit_s,
            lease_duration=LEASE_S,
            raise_on_lease_renewal_failure=False,  # a run outlives its server
        )
        logging.getLogger("prefect.concurrency").addFilter(_without_traceback)
        slots.__enter__()
        stack.push(partial(_leave, slots, patience))
    except TimeoutError:
        busy = f"{', '.join(wanted)} in use by another run (waited {patience.wait_s:g} s)"
        raise BusyError(busy, hint=locks.HINT) from None
    except BusyError:
        raise
    except Exception as error:
        patience.say(f"Prefect's server gives no slot of {', '.join(wanted)}, going on: {error}")


def _leave(slots: Any, patience: Patience, *error: Any) -> bool:
    """Release the slots. If the server is gone, a stage must not fail after its work is done."""
    try:
        slots.__exit__(*error)
    except Exception as problem:
        if problem is not error[1]:
            patience.say(f"Prefect's server has not released a slot, its lease ends: {problem}")
    return False


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = record.exc_text = None
    return True


def _limit(client: Any, name: str) -> Any:
    """Return a global concurrency limit, which is created with one slot if it does not exist."""
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    try:
        return client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        with contextlib.suppress(ObjectAlreadyExists):
            fresh = GlobalConcurrencyLimitCreate(name=name, limit=1)
            client.create_global_concurrency_limit(fresh)
        return client.read_global_concurrency_limit_by_name(name)
