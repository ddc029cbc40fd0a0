"""Deliver a checkpoint with a record, and verify a server that serves it, as a user does."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.commands import command, environment, run_in_empty, summary_of
from tests.verify.serving import serve


def deliver(tmp_path: Path, source: Path, *more: str) -> tuple[int, str]:
    """Run `flows/deliver.py` with `out=tmp_path/served`; returns exit status and output."""
    cwd = tmp_path / "elsewhere"
    cwd.mkdir(exist_ok=True)
    out, runs = tmp_path / "served", tmp_path / "runs"
    shutil.rmtree(out, ignore_errors=True)
    argv = command("deliver", f"source={source}", f"out={out}", f"paths.runs={runs}", *more)
    done = run_in_empty(cwd, argv, env=environment(OMP_NUM_THREADS="1"), timeout=580)
    return done.returncode, done.stdout


def assert_delivered(tmp_path: Path, source: Path, *more: str) -> dict[str, float]:
    """Deliver without `merge.base`, which only the record tells; returns the mean KL by stage."""
    status, text = deliver(tmp_path, source, "smoke.engine=transformers", *more)
    assert status == 0, text
    assert "witness: " in text
    stages = {stage["name"]: stage for stage in summary_of(tmp_path / "runs")["stages"]}
    drifts = {name: stages[name]["drift"]["mean_kl"] for name in ("reference", "smoke_eval")}
    assert max(drifts.values()) < 1e-3
    return drifts


def verify(tmp_path: Path, url: str, source: Path, name: str = "", *more: str) -> tuple[int, str]:
    """Run `flows/verify.py`; returns exit status and output."""
    cwd = tmp_path / "elsewhere"
    cwd.mkdir(exist_ok=True)
    named = [f"name={name}"] if name else []
    words = command("verify", f"url={url}", f"source={source}", *named, *more)
    done = run_in_empty(cwd, words, env=environment(), timeout=580)
    return done.returncode, done.stdout


def assert_served(tmp_path: Path, base: Path, adapters: Mapping[str, Path]) -> None:
    """Serve adapters beside their base in one vLLM: each is verified, the first not as the last."""
    with serve(base, adapters, log=tmp_path / "server.log") as server:
        for name, source in adapters.items():
            status, text = verify(tmp_path, server.url, source, name)
            print(f"{name}: {text.splitlines()[-1]}")
            assert status == 0, f"{name}: {text}"
        first, *_, last = adapters
        status, text = verify(tmp_path, server.url, adapters[first], last)
        assert status == 1, f"{last} for {first}: {text}"
