"""Detection rate of verify against the size of a fault, on a running vLLM.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora --max-lora-rank 64 &
    python -m benchmarks.verify --url http://127.0.0.1:8000 ADAPTER...

Each ADAPTER has a witness and lies on the server's machine. It is served with a share of its
update of the weights (1 is the trained model, 0 the base), and with noise in its B matrices; the
table says in how many cases verify found a fault, and the smallest and largest mean KL.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tasks.verify.dialects import connect
from tasks.verify.reference import read_reference
from tasks.verify.run import DECISIVE, Report, Target, verify

ADAPTER = "adapter_model.safetensors"
SHARES = (1.0, 0.999, 0.99, 0.97, 0.95, 0.9, 0.8, 0.5, 0.0)
NOISES = (0.003, 0.01, 0.03, 0.1, 0.3)
CHECKS = (DECISIVE, "adapter")
"""Checks that judge the weights; the others ask about prompts, sampling and load."""
Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Fault:
    """One size of a fault."""

    name: str
    write: Callable[[Path, Path, int], Path]


def altered(source: Path, out: Path, change: Callable[[Tensors], Mapping[str, Any]]) -> Path:
    """Copy an adapter with other tensors, without its checkpoints and its witness."""
    out.mkdir(parents=True)
    shutil.copy(source / "adapter_config.json", out)
    tensors = load_file(source / ADAPTER)
    save_file({**tensors, **change(tensors)}, out / ADAPTER, metadata={"format": "pt"})
    return out


def mixed(source: Path, out: Path, share: float) -> Path:
    """Write an adapter whose update of the weights is `share` of the trained one."""
    return altered(
        source, out, lambda tensors: {k: v * v.dtype.type(share) for k, v in _b(tensors)}
    )


def noisy(source: Path, out: Path, size: float, seed: int) -> Path:
    """Add Gaussian noise to every B, `size` times as large as B itself."""
    random = np.random.default_rng(seed)

    def spoilt(array: NDArray[Any]) -> NDArray[Any]:
        noise: NDArray[Any] = size * array.std() * random.standard_normal(array.shape)
        return (array + noise).astype(array.dtype)

    return altered(source, out, lambda tensors: {k: spoilt(v) for k, v in _b(tensors)})


def _b(tensors: Tensors) -> Iterator[tuple[str, NDArray[Any]]]:
    return ((name, array) for name, array in tensors.items() if "lora_B" in name)


def faults() -> Iterator[Fault]:
    """Yield all sizes of both kinds of faults."""
    for share in SHARES:
        yield Fault(
            f"share {share:g}", lambda source, out, _, share=share: mixed(source, out, share)
        )
    for size in NOISES:
        yield Fault(
            f"noise {size:g}", lambda source, out, seed, size=size: noisy(source, out, size, seed)
        )


def report_of(url: str, name: str, adapter: Path, profile: str) -> Report:
    """Verify one model of the server."""
    server = connect(url, model=name)
    base = next((entry.parent for entry in server.models() if entry.name == name), None)
    target = Target(name, base)
    return verify(server, target, read_reference(adapter), profile, only=CHECKS)


def measure(url: str, adapters: Sequence[Path], profile: str) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| fault | found | mean KL |"
    yield "|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(faults()):
            outcomes, distances = [], []
            for which, adapter in enumerate(adapters):
                name = f"bench-{time.time_ns()}"
                out = fault.write(adapter, Path(folder) / f"{number}-{which}", which)
                _post(url, "load_lora_adapter", {"lora_name": name, "lora_path": str(out)})
                report = report_of(url, name, adapter, profile)
                _post(url, "unload_lora_adapter", {"lora_name": name})
                outcomes.append(report.outcome == "fault")
                distances += [float(c.measured["mean_kl"]) for c in report.checks[:1]]
            share = f"{sum(outcomes)} of {len(outcomes)}"
            yield f"| {fault.name} | {share} | {min(distances):.1e} to {max(distances):.1e} |"


def _post(url: str, path: str, document: Mapping[str, str]) -> None:
    httpx.post(f"{url}/v1/{path}", json=document, timeout=120).raise_for_status()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapters", nargs="+", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--profile", default="standard")
    arguments = parser.parse_args()
    for line in measure(arguments.url, arguments.adapters, arguments.profile):
        print(line, flush=True)


if __name__ == "__main__":
    main()
