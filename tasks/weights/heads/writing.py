"""Heads carried out: from a folder of any dialect to folders that each hold one thing.

    write_served(found, served)            the language model alone, or the reward model
    write_value_head(found, elsewhere)     a policy's value head

Each plans, validates and executes; nothing is written before all findings are known. `out` is an
empty folder, as a stage's staging directory is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.errors import ArtifactError, ContractError
from tasks.weights.execute import Executed, execute
from tasks.weights.heads.detect import Found
from tasks.weights.heads.separate import separate
from tasks.weights.heads.split import STEM, describe_head, head_sources, plan_value_head
from tasks.weights.reader import ADAPTER, DTYPE_NAMES, WEIGHTS
from tasks.weights.validate import validate
from tasks.weights.worker import Perform, perform

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
_SHOWN = 50
_NOT_COPIED = ("manifest.json", "contract.json", "value_head.json")


def write_served(
    found: Found,
    out: Path,
    *,
    reward: bool | None = None,
    max_shard_bytes: int | None = None,
    perform: Perform = perform,
) -> Executed:
    """What is served of the folder: a reward model as its class has it, a policy without its head.

    Args:
        found: what `detect` said.
        out: empty folder.
        reward: whether it is a reward model; None goes by the head.
        max_shard_bytes: of tensor data in one file.
        perform: who derives the contract; this process, unless a warm one is given.

    Raises:
        ContractError: no head, or one that cannot be used; tensors that the class does not have;
            values that are not finite, which only reading tells: `out` is then to be thrown away.
        ArtifactError: the family has no such class; unreadable files; a full disk.
    """
    config, root = found.folder.config, found.folder.root
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in DTYPE_NAMES:
        raise ArtifactError(f"{root}: config.json says dtype {dtype!r}")
    parted = separate(
        found, dtype=dtype, reward=reward, max_shard_bytes=max_shard_bytes, perform=perform
    )
    validate(parted.plan, parted.sources, out=out)
    stem = WEIGHTS if found.folder.adapter_config is None else ADAPTER
    done = execute(parted.plan, parted.sources, out, stem=stem, scan=True)
    _require_finite(done, root)
    copy_side_files(root, out)
    if parted.config:
        _write_json(out / "config.json", parted.config)
    return done


def write_value_head(found: Found, out: Path) -> Executed:
    """`value_head.safetensors` and `value_head.json`. Raises ContractError, ArtifactError."""
    sources = head_sources(found)
    plan = plan_value_head(found)
    validate(plan, sources, out=out)
    done = execute(plan, sources, out, stem=STEM, scan=True)
    _require_finite(done, found.folder.root)
    _write_json(out / f"{STEM}.json", describe_head(found))
    return done


def _require_finite(done: Executed, root: Path) -> None:
    found = [f"{name}: {count} elements not finite" for name, count in done.nonfinite.items()]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ContractError(f"{root}: {found[0]}{more}", details=found[:_SHOWN])


def copy_side_files(root: Path, out: Path) -> list[str]:
    """Copy configuration and tokenizer, no weights and nothing hidden."""
    copied = []
    for path in sorted(root.iterdir()):
        weights = path.suffix in _WEIGHT_FILES or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in _NOT_COPIED and path.name[0] != ".":
            shutil.copyfile(path, out / path.name)
            copied.append(path.name)
    return copied


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
