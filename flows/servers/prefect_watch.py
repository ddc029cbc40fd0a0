"""Watch a flow run on Prefect's server from a thread: outages, and a cancel in Prefect's page.

A run needs the server to begin. After that it goes on without it: `Watch` reports an outage in one
line, and turns off what would wait for a dead server (Prefect tries each request for a minute). The
end of a run whose server is gone is known to this process alone; `final_state` returns it.

A worker ends the runs that it has started when they are cancelled. Nobody but the run itself can do
that for a run on a terminal.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from tasks.core.errors import PlumblineError
from tasks.core.redaction import redact

log = logging.getLogger(__name__)

POLL_S = 5.0
ANSWER_S = 5.0
"""Time limit of one request."""
ATTEMPTS = 2
"""Failed requests in a row after which the server counts as gone."""
WORKER_S = 15.0
"""Seconds that a worker has to end a cancelled run of a deployment, before the run does it."""
BREAKER = {"PREFECT_CLIENT_MAX_RETRIES": "0", "PREFECT_LOGGING_TO_API_ENABLED": "false"}
"""Settings of Prefect while its server is gone."""
NOISY = ("prefect.events.clients", "prefect._internal.concurrency", "GlobalEventLoopThread")
"""Loggers that repeat for every record that the server is gone."""


class Watch:
    """Ask the server every few seconds, for as long as a flow runs.

    Args:
        run_id: Prefect's id of the flow run.
        url: URL of the API, for messages.
        by_worker: True for the run of a deployment.

    Attributes:
        gone: why the server does not answer; empty if it does.
        is_cancelled: True once this run was cancelled in Prefect, and has been told to end.
        outcome: final state of the flow's body, once it has ended.
    """

    def __init__(self, run_id: str, url: str, *, by_worker: bool) -> None:
        self._run_id, self._url, self._by_worker = run_id, redact(url), by_worker
        self.gone = ""
        self.is_cancelled = False
        self.outcome: Any = None
        self._before: dict[str, str | None] = {}  # variables that an outage changes
        self._outages: list[tuple[datetime, datetime]] = []
        self._since = datetime.now()  # of the outage, if there is one
        self._cancel_seen: float | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefect watch", daemon=True)
        self._thread.start()

    def check(self, attempts: int = ATTEMPTS) -> None:
        """Ask the server now.

        Args:
            attempts: failed requests in a row after which it counts as gone.
        """
        with self._lock:
            for attempt in range(1 if self.gone else attempts):
                time.sleep(min(1, attempt))
                # In a context of its own, whose settings are that of this request.
                reason = contextvars.copy_context().run(self._ask)
                if not reason:
                    break
            if reason and not self.gone:
                self._since = datetime.now()
                log.warning(
                    "Prefect's server at %s does not answer (%s). The run goes on; its states and "
                    "logs are not recorded there until it answers again", self._url, reason,
                )  # fmt: skip
                self._break(reason)
            elif self.gone and not reason:
                self._outages.append((self._since, datetime.now()))
                self.mend()
                log.warning("Prefect's server at %s answers again", self._url)

    def report(self) -> str:
        """Return a line about what Prefect has not recorded; empty if it has everything."""
        if self.gone:
            return (
                f"Prefect's server at {self._url} does not answer ({self.gone}): states and logs "
                f"since {self._since:%H:%M:%S} are not recorded there, the end of this run neither"
            )
        if self._outages:
            times = ", ".join(f"{a:%H:%M:%S} to {b:%H:%M:%S}" for a, b in self._outages)
            return (
                f"Prefect's server at {self._url} did not answer from {times}: states and logs "
                "of that time are missing there"
            )
        return ""

    def close(self, attempts: int) -> None:
        """End the thread, and ask a last time: Prefect's engine reports the end of the run next."""
        self._closing.set()
        self.check(attempts)

    def record_cancelled(self) -> None:
        """Record the end of a cancelled run, which Prefect's page has left as `Cancelling`."""
        from prefect.client.orchestration import get_client
        from prefect.states import Cancelled

        with contextlib.suppress(Exception), get_client(sync_client=True) as client:
            client.set_flow_run_state(self._run_id, Cancelled(), force=True)

    def _work(self) -> None:
        while not self._closing.wait(POLL_S):
            self.check()
            seen = self._cancel_seen
            patience = WORKER_S if self._by_worker else 0.0
            if seen is None or time.monotonic() - seen < patience or self._closing.is_set():
                continue
            self.is_cancelled = True
            log.warning("this run was cancelled in Prefect: ending its processes")
            os.kill(os.getpid(), signal.SIGTERM)
            return

    def _ask(self) -> str:
        """Read the state of the flow run. Returns why that failed; empty if it did not."""
        from prefect.client.orchestration import get_client
        from prefect.exceptions import ObjectNotFound
        from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        try:
            with (
                temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
                get_client(httpx_settings={"timeout": ANSWER_S}, sync_client=True) as client,
            ):
                state = client.read_flow_run(self._run_id).state
        except ObjectNotFound:
            return ""  # somebody has deleted the run in Prefect's page
        except Exception as error:
            return str(error).splitlines()[0] if str(error) else f"no answer in {ANSWER_S:g} s"
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            self._cancel_seen = self._cancel_seen or time.monotonic()
        return ""

    def _break(self, reason: str) -> None:
        self.gone = reason
        self._before = {name: os.environ.get(name) for name in BREAKER}
        os.environ |= BREAKER
        _refresh_settings()

    def mend(self) -> None:
        """Restore the settings of Prefect."""
        self.gone = ""
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _refresh_settings()


_watch: Watch | None = None


def current() -> Watch | None:
    """Return the watch of the flow that runs, or has run last, in this process."""
    return _watch


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watch the flow run of this thread while the block runs."""
    global _watch
    from prefect.exceptions import Abort
    from prefect.runtime import flow_run
    from prefect.settings import PREFECT_API_URL
    from prefect.states import Cancelled

    from flows.orchestration.deployment import in_deployment

    watch = Watch(str(flow_run.id), PREFECT_API_URL.value() or "", by_worker=in_deployment())
    _watch = watch
    logging.raiseExceptions = False  # Prefect would print every batch of logs that is not sent
    for name in (*NOISY, "prefect.flow_runs"):
        logging.getLogger(name).addFilter(_is_news)
    attempts = ATTEMPTS
    try:
        yield watch
    except BaseException as error:
        attempts = ATTEMPTS if isinstance(error, Exception) else 1  # a stopped process has seconds
        if watch.is_cancelled:
            watch.record_cancelled()
            cancelled = Abort("cancelled in Prefect")
            cancelled.state = Cancelled()  # read by Prefect's engine
            raise cancelled from None
        raise
    finally:
        watch.close(attempts)


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for what Prefect says about a server of which `Watch` has said that it is gone.

    A flow run whose end the server cannot take ends for Prefect's engine with an error of the
    client, in the state Running.
    """
    if _watch is None or not _watch.gone:
        return True
    error = record.exc_info[1] if record.exc_info else None
    ours = error is None and not str(record.msg).startswith("Finished in state")
    return ours and record.name not in NOISY


def final_state(run: Callable[[], Any]) -> Any:
    """Run a flow in this process.

    Args:
        run: calls the flow and returns its final state.

    Returns:
        The final state; that of the flow's body if Prefect's server could not take it.

    Raises:
        PlumblineError: the server has gone away before the run began.
        SystemExit: the run was cancelled in Prefect.
    """
    before = current()
    if before is not None and before.gone:  # in an earlier run of a sweep
        before.mend()
    try:
        return run()
    except Exception as error:
        import httpx

        watch = current()
        if watch is not None and watch is not before:
            if watch.gone and watch.outcome is not None:
                return watch.outcome
        elif isinstance(error, httpx.HTTPError):
            url = redact(os.environ.get("PREFECT_API_URL", ""))
            what = f"Prefect's server at {url} does not answer: {error}"
            raise PlumblineError(what, hint="start it again, and type the same command") from None
        raise
    except BaseException:
        watch = current()
        if watch is not None and watch.is_cancelled:
            raise SystemExit(CANCELLED) from None
        raise


CANCELLED = 143
"""Exit status of a run that was cancelled in Prefect: that of SIGTERM."""


def _refresh_settings() -> None:
    """Let Prefect read its environment again."""
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()
