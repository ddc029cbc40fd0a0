"""Report an error of ours as the state of its flow run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flows.cli.bootstrap import quiet_logging
from flows.orchestration.deployment import in_deployment
from flows.servers.prefect_watch import watched
from tasks.core.errors import PlumblineError
from tasks.core.private import stay_private
from tasks.core.redaction import redact, redact_error
from tasks.core.terminal import plain


def reported(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run the body of a flow, so that Prefect's pages show the report of an error of ours.

    Prefect's own message of a raised error is its first line, with a traceback in the logs. The
    report has the problems and what to type.

    Args:
        work: the body.

    Returns:
        The result. If an error of ours was raised: a failed state, which Prefect takes as the
        state of the flow run. Its message is the report, its data the error.
    """
    from prefect import get_run_logger
    from prefect.states import Completed, Failed

    quiet_logging()  # a worker's process has not called `bootstrap`
    if in_deployment():
        stay_private()
    with watched() as watch:
        try:
            result = work()
        except PlumblineError as error:
            report = plain(error.report())
            if in_deployment():  # on a terminal the command prints it
                get_run_logger().error("%s", report)
            watch.outcome = failed = Failed(message=report, data=error)
            return failed
        except Exception as error:
            redact_error(error)  # Prefect records its message
            watch.outcome = Failed(message=redact(str(error)), data=error)
            raise
        watch.outcome = Completed(data=result)
        return result
