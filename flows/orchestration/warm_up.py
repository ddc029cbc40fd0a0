"""What a flow takes seconds for that can be done while its Prefect server starts."""

from __future__ import annotations

import contextlib
import importlib

from flows.cli.config import Composed


def warm_up(composed: Composed, flow: str) -> None:
    """Import the flow, and have MLflow make its database.

    Args:
        composed: the configuration.
        flow: module of the flow.
    """
    importlib.import_module(flow)
    importlib.import_module("mlflow")
    if composed.settings["tracking"]["uri"]:
        return  # a server of the user's has its database
    from flows.orchestration.flow_run import tracker_of

    with contextlib.suppress(Exception):  # the flow does it again, and tells of what goes wrong
        tracker_of(composed)
