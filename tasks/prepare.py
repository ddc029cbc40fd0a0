"""prepare: the base model and the data, resolved to local artifacts.

`prepare_base` makes the embedded toy model in a child process, or links the files of a Hugging Face
model; `prepare_data` turns rows into `train.jsonl` and `heldout.jsonl`. `source_identity` says what
the user's files are now, so that a changed file leads to a new artifact.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.errors import ArtifactError, ConfigError, DataError, first_and_more
from tasks.data.build import Options, build_dataset
from tasks.data.columns import Columns
from tasks.data.kinds import CONVERSATIONS, KINDS
from tasks.data.readers import FILE_KINDS, HUB, existing_file, read_rows
from tasks.data.sources import ALL_EXHAUSTED, Source
from tasks.pipeline.report import StageReport
from tasks.process.launch import launch, python_child
from tasks.toy.dataset import write_dataset
from tasks.weights.files.add_tokens import grow
from tasks.weights.files.folder import inspect_checkpoint

Log = logging.Logger | logging.LoggerAdapter[Any]
OnEvent = Callable[[dict[str, Any]], None]
TOY, HF = "toy", "hf"
PRETRAIN_TIMEOUT_S = 900.0
CHAT_TEMPLATE = "chat_template.jinja"


def prepare_base(
    out: Path,
    *,
    kind: str,
    path: str | None = None,
    revision: str | None = None,
    steps: int = 400,
    seed: int = 0,
    new_tokens: Sequence[str] = (),
    vocab_multiple: int = 1,
    source: Mapping[str, Any] | None = None,
    log_path: Path,
    log: Log,
    on_event: OnEvent | None = None,
) -> StageReport:
    """Fill `out` with a base model: a Hugging Face folder with safetensors and a tokenizer.

    Args:
        out: empty directory.
        kind: "toy" pre-trains the embedded model; "hf" links an existing one.
        path: folder or hub id; for "hf".
        revision: branch, tag or commit of a hub id.
        steps: pre-training steps of the toy.
        seed: seed of the toy.
        new_tokens: texts that become tokens of the base.
        vocab_multiple: rows of the vocabulary are a multiple of this once tokens are added.
        source: what `source_identity` said; remembered in the notes.
        log_path: file for the child's output.
        log: progress.
        on_event: gets the child's events.

    Raises:
        ConfigError: unknown kind, no such model.
        ArtifactError: a model folder that cannot be used; details name every problem.
    """
    started = time.monotonic()
    if kind == TOY:
        _pretrain(out, steps=steps, seed=seed, log=log, log_path=log_path, on_event=on_event)
    elif kind == HF:
        for name, file in _usable(resolve_model(path, revision=revision)).items():
            (out / name).symlink_to(file.resolve())
    else:
        raise ConfigError(f"model.kind={kind} is not known", hint="model=toy or model=hf")
    if new_tokens:
        grown = grow(out, new_tokens, multiple=vocab_multiple)
        log.info("prepare_base: %d tokens added, %d rows", len(grown.ids), grown.after)
    found = inspect_checkpoint(out)
    checks = [
        *found.checks,
        *(Check("folder", "usable", text, ok=False) for text in found.problems),
    ]
    metrics = {
        "base/tensors": float(found.tensors),
        "base/bytes": float(found.bytes),
        "base/seconds": time.monotonic() - started,
    }
    notes = {"kind": kind, "path": path, "revision": revision, "source": dict(source or {})}
    return StageReport("base", checks=tuple(checks), metrics=metrics, notes=notes)


def prepare_data(
    out: Path,
    *,
    kind: str,
    rows: str = CONVERSATIONS.name,
    path: str | None = None,
    eval_path: str | None = None,
    name: str | None = None,
    split: str = "train",
    eval_split: str | None = None,
    sources: Sequence[Mapping[str, Any]] = (),
    stopping: str = ALL_EXHAUSTED,
    eval_fraction: float = 0.05,
    max_samples: int | None = None,
    on_bad_line: str = "fail",
    chat_template: str | None = None,
    seed: int = 0,
    train_size: int = 4000,
    heldout_size: int = 300,
    answered: bool = False,
    source: Mapping[str, Any] | None = None,
    log: Log,
    **keys: str | None,
) -> StageReport:
    """Fill `out` with `train.jsonl`, `heldout.jsonl` and the account of every row.

    The arguments are the keys of `conf/data`, the kind of rows that the objective learns from
    (`tasks/data/kinds.py`), and `answered`: whether a prompt without an answer is a bad row, since
    something compares with it. A chat template file is copied beside the data.

    Raises:
        DataError: what cannot be used, with file and line.
    """
    if chat_template is not None:
        shutil.copyfile(existing_file(chat_template, key="data.chat_template"), out / CHAT_TEMPLATE)
    if kind == TOY:
        try:
            account = write_dataset(
                out, train_size=train_size, heldout_size=heldout_size, seed=seed, rows=rows
            )
        except ValueError as error:
            raise DataError(
                str(error), hint="data.train_size=4000 data.heldout_size=300"
            ) from error
    else:
        columns = Columns.of(keys)
        given = sources or [{"path": name if kind == HUB else path, "split": split}]
        test = {"path": name if kind == HUB else eval_path, "split": eval_split}
        apart = eval_split if kind == HUB else eval_path
        account = build_dataset(
            out,
            train=[_source(kind, each, columns, key="data.path") for each in given],
            held_out=_source(kind, test, columns, key="data.eval_path") if apart else None,
            options=Options(
                kind=KINDS[rows],
                eval_fraction=eval_fraction,
                seed=seed,
                max_samples=max_samples,
                on_bad_line=on_bad_line,
                stopping=stopping,
                answered=answered,
            ),
            log=log,
        )
    account["source"] = {"kind": kind, **(source or {})}
    (out / "dataset.json").write_text(json.dumps(account, indent=1) + "\n", encoding="utf-8")
    return StageReport("dataset", _adds_up(account), _metrics(account), notes=account)


def source_identity(
    *,
    kind: str,
    path: str | None = None,
    eval_path: str | None = None,
    chat_template: str | None = None,
    sources: Sequence[Mapping[str, Any]] = (),
    **_: Any,
) -> dict[str, Any]:
    """What the user's files are now: size and modification time of each, by path.

    Further keys of `conf/data` and `conf/model` are accepted and play no part. Files that do not
    exist have no entry: the stage says what is wrong with them. A hub id has none either: its
    revision identifies it.
    """
    found: dict[str, Any] = {}
    if kind == TOY:
        return found
    for given in (path, eval_path, chat_template, *(each["path"] for each in sources)):
        if given is None:
            continue
        root = Path(given).expanduser()
        inside = sorted(root.iterdir()) if root.is_dir() else [root]
        for file in (entry for entry in inside if entry.is_file()):
            stat = file.stat()
            found[str(file.resolve())] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return found


def resolve_model(path: str | None, *, revision: str | None = None) -> Path:
    """The local folder of a model; a hub id is downloaded, or found in the local cache.

    Raises:
        ConfigError: neither a folder nor an id that can be had.
    """
    if not path:
        raise ConfigError("model=hf needs model.path", hint="model.path=<folder or hub id>")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or folder.is_absolute() or path.startswith((".", "~")):
        what = "is not a folder" if folder.exists() else "no such folder"
        raise ConfigError(f"model.path={path}: {what}", hint="model.path=<folder or hub id>")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, ignore_patterns=_NOT_NEEDED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model.path={path}: no such folder, and no such model on the hub",
            details=str(error).strip().splitlines()[:3],
            hint="model.path=<folder>, or an id that this machine can download",
        ) from error


_NOT_NEEDED = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*"]


def _usable(folder: Path) -> dict[str, Path]:
    found = inspect_checkpoint(folder)
    if found.problems:
        raise ArtifactError(
            f"{folder} cannot be used as a base: {first_and_more(found.problems)}",
            details=found.problems,
            hint="mend the folder or download it again; model.path=<another folder>",
        )
    return found.files


def _pretrain(
    out: Path, *, steps: int, seed: int, log: Log, log_path: Path, on_event: OnEvent | None
) -> None:
    """Run the child that makes the toy model. Its job file lies beside its log."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    job = log_path.with_suffix(".job.json")
    job.write_text(json.dumps({"out": str(out.resolve()), "steps": steps, "seed": seed}))
    launch(
        python_child("tasks.toy", str(job.resolve())),
        stage="prepare_base",
        log=log,
        log_path=log_path,
        # Threads that spin while they wait make a step ten times slower where cores are shared.
        env={"OMP_WAIT_POLICY": "passive"},
        timeout_s=PRETRAIN_TIMEOUT_S,
        on_event=on_event,
    )


def _source(kind: str, given: Mapping[str, Any], columns: Columns, *, key: str) -> Source:
    """One entry of `data.sources`, or the one source that `data.path` or `data.name` names."""
    kind = given.get("kind") or kind
    if kind not in (*FILE_KINDS, HUB):
        raise DataError(
            f"data.kind={kind} is not known", hint=f"data={'|'.join((TOY, *FILE_KINDS, HUB))}"
        )
    name, split = given["path"], given.get("split") or "train"
    if not name:
        wanted = "data.name=<owner/name>" if kind == HUB else f"{key}=<file>"
        raise DataError(f"data={kind} needs {wanted.partition('=')[0]}", hint=wanted)
    if kind in FILE_KINDS:
        existing_file(name, key=key)
    return Source(
        name=str(name),
        open=lambda: read_rows(kind, name, split=split),
        columns=_columns(columns, given),
        probability=given.get("probability"),
        max_samples=given.get("max_samples"),
    )


def _columns(columns: Columns, given: Mapping[str, Any]) -> Columns:
    """The section's columns, and what a source names otherwise."""
    named = {f.name: given.get(f"{f.name}_key") for f in fields(Columns)}
    return replace(columns, **{k: v for k, v in named.items() if v is not None})


def _adds_up(account: Mapping[str, Any]) -> tuple[Check, ...]:
    """Every row that was read is accounted for."""
    checks = []
    for split, counts in account["splits"].items():
        told = counts["kept"] + counts["refused"] + counts["overlapping"]
        name = f"{split}: kept + refused + overlapping"
        ok = counts["read"] == told and counts["kept"] > 0
        checks.append(Check(name, f"{counts['read']} rows read", f"{told} rows", ok=ok))
    return tuple(checks)


def _metrics(account: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"data/{split}_{name}": float(count)
        for split, counts in account["splits"].items()
        for name, count in counts.items()
    }
