"""Register `WitnessCallback` when `transformers.trainer` is imported.

Python imports `sitecustomize` at its start. `python -m plumbline_witness` puts this folder first on
PYTHONPATH; a `sitecustomize` of the environment that this one hides is run, too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

WATCHED = "transformers.trainer"
HERE = str(Path(__file__).resolve().parent)


class Registrar(importlib.abc.MetaPathFinder):
    """Find the watched module as Python would, and register the callback once it has run."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's spec with a loader that registers; None for every other module."""
        if fullname != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            importlib.import_module("plumbline_witness.callback").register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_hidden() -> None:
    """Run the environment's own `sitecustomize`, which this one hides."""
    rest = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, Registrar())
_run_hidden()
