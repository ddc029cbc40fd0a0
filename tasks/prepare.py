"""prepare: turn the base model and the data into local artifacts.

`prepare_base` pre-trains the embedded toy model in a child process, or takes a Hugging Face model:
it links the weights and copies the other files. `prepare_data` writes the rows to `train.jsonl` and
`heldout.jsonl`. `source_identity` describes the user's files, so that a changed file leads to a new
artifact.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tasks.config.defaults import COMPUTED
from tasks.config.sections import Data, Model
from tasks.core.contract import Check
from tasks.core.errors import ConfigError, DataError
from tasks.core.files import file_stats
from tasks.core.hub import hub_config, hub_errors
from tasks.data.build import KEEP, Control, Options, account, build_dataset
from tasks.data.kinds import CONVERSATIONS, KINDS, PROMPTS, TEXTS, kind_for, names_texts
from tasks.data.messages import Columns
from tasks.data.readers import FILE_KINDS, HUB, Source, existing_file, read_rows
from tasks.pipeline.stage import StageReport
from tasks.process.launch import OnEvent, launch, python_child
from tasks.process.output import Log
from tasks.rl.rewards import EXACT_MATCH
from tasks.toy.pretrain import SPECIAL_TOKENS
from tasks.toy.splits import write_dataset
from tasks.weights.files.documents import optional_json
from tasks.weights.files.folder import (
    CHAT_TEMPLATE,
    CODE,
    copy_side_file,
    model_files,
    require_own_files,
    side_files,
)
from tasks.weights.files.tensors import size_of
from tasks.weights.tokens import tokenizer
from tasks.weights.tokens.add_tokens import grow

TOY = "toy"
PRETRAIN_TIMEOUT_S = 900.0
_NOT_NEEDED = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*"]
"""Files of a Hugging Face repository that are not downloaded."""


def prepare_base(
    out: Path,
    *,
    log_path: Path,
    log: Log,
    on_event: OnEvent | None = None,
    # raises ConfigError for a broken base of the Hub, which no preflight has read
    examine: Callable[[Path], Sequence[str]] = lambda _: (),
    source: Mapping[str, Any] | None = None,  # result of `source_identity`, for the notes
    **settings: Any,  # section `model`
) -> StageReport:
    """Fill `out` with a base model: a Hugging Face folder with safetensors and a tokenizer.

    Raises ConfigError for no such model, ArtifactError, which names every problem, for a folder
    that cannot be used.
    """
    started, base = time.monotonic(), Model(**settings)
    if base.kind == TOY:
        _pretrain(out, base, log=log, log_path=log_path, on_event=on_event)
    else:
        folder = resolve_model(base.path, revision=base.revision)
        require_own_files(folder)
        files, _ = model_files(folder)
        tokenizer.require_bounded_template(folder)
        if not Path(base.path or "").expanduser().is_dir():
            for warning in examine(folder):
                log.warning("%s", warning)
        if base.trust_remote_code:
            files |= {path.name: path for path in side_files(folder, CODE)}
        for name, file in files.items():
            if file.suffix == ".safetensors":
                (out / name).symlink_to(file.resolve())
            else:
                copy_side_file(file, out / name)
    if base.new_tokens:
        grown = grow(out, base.new_tokens)
        log.info("prepare_base: %d tokens added, %d rows", len(grown.ids), grown.after)
    _, tensors = model_files(out)
    metrics = {
        "base/tensors": float(len(tensors)),
        "base/bytes": float(size_of(tensors)),
        "base/seconds": time.monotonic() - started,
    }
    notes = {"kind": base.kind, "path": base.path, "revision": base.revision}
    return StageReport("base", metrics=metrics, notes={**notes, "source": dict(source or {})})


def prepare_data(
    out: Path,
    *,
    log: Log,
    rows: str = CONVERSATIONS.name,  # kind that the objective trains on: `tasks/data/kinds.py`
    source: Mapping[str, Any] | None = None,  # result of `source_identity`, for the notes
    answered: bool = False,  # True if a prompt needs an answer
    model_tokens: Sequence[str] = (),  # control tokens of the model's tokenizer
    last_answer: bool = False,  # True if only the last answer of a conversation bears loss
    **section: Any,  # section `data`
) -> StageReport:
    """Fill `out` with `train.jsonl`, `heldout.jsonl` and the counts of all rows.

    Raises DataError, which names file and line, for unusable rows or files.
    """
    data = Data(**section)
    if data.chat_template is not None:
        template = existing_file(data.chat_template, key="data.chat_template")
        shutil.copyfile(template, out / CHAT_TEMPLATE)
    if data.kind == TOY:
        sizes = {"train": data.train_size, "heldout": data.heldout_size}
        try:
            write_dataset(out, sizes, seed=data.seed, rows=rows, tasks=data.tasks)
        except ValueError as error:
            hint = "data.train_size=4000 data.heldout_size=300"
            raise DataError(str(error), hint=hint) from error
        made = account(rows, {name: {"read": n, "kept": n} for name, n in sizes.items()})
    else:
        options = Options(
            KINDS[rows],
            data.eval_fraction,
            data.seed,
            data.max_samples,
            data.on_bad_line,
            data.stopping,
            answered,
            Control(tuple(model_tokens), data.control_tokens, last_answer),
            data.ignored_columns,
        )
        train, held_out = _sources(data)
        made = build_dataset(out, train=train, held_out=held_out, options=options, log=log)
    # Times stay out of the file: new times of equal files must not train again.
    files = {path: {"size": stats[0]} for path, stats in (source or {}).items()}
    made["source"] = {"kind": data.kind, **files}
    (out / "dataset.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    metrics = {
        f"data/{split}_{name}": float(count)
        for split, counts in made["splits"].items()
        for name, count in counts.items()
    }
    checks = tuple(
        Check(f"{split}: rows", "at least 1", str(counts["kept"]), counts["kept"] > 0)
        for split, counts in made["splits"].items()
    )
    return StageReport("dataset", checks, metrics, notes=made)


def _sources(data: Data) -> tuple[list[Source], Source | None]:
    """Return the sources of training rows, and that of held-out rows if there is one."""
    hub = data.kind == HUB
    entries: Sequence[Any] = data.sources or [
        {"path": data.name if hub else data.path, "split": data.split}
    ]
    held_out = None
    if data.eval_split if hub else data.eval_path:
        entry = {"path": data.name if hub else data.eval_path, "split": data.eval_split}
        held_out = _source(data, entry, key="data.eval_path")
    return [_source(data, entry, key="data.path") for entry in entries], held_out


def source_identity(
    *,
    kind: str,
    path: str | None = None,
    eval_path: str | None = None,
    chat_template: str | None = None,
    sources: Sequence[Mapping[str, Any]] = (),
    **_: Any,
) -> dict[str, Any]:
    """Return size, mtime, ctime and inode of each of the user's files, by path.

    Further keys of the sections `data` and `model` are ignored. Missing files have no entry (the
    stage reports them), nor has a Hugging Face id (its revision identifies it).
    """
    identity: dict[str, Any] = {}
    if kind == TOY:
        return identity
    for name in (path, eval_path, chat_template, *(each["path"] for each in sources)):
        if name is None:
            continue
        root = Path(name).expanduser()
        inside = sorted(root.iterdir()) if root.is_dir() else [root]
        for file in (entry for entry in inside if entry.is_file()):
            identity[str(file.resolve())] = file_stats(file)
    return identity


def data_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `prepare_data` for the settings of a run."""
    data = {k: v for k, v in settings["data"].items() if k != "max_truncated"}
    kind = kind_for(settings["train"]["objective"], texts=names_texts(data))
    arguments = {**data, "rows": kind.name, "source": source_identity(**data)}
    if not (data["kind"] == TOY or kind is TEXTS or data["control_tokens"] == KEEP):
        arguments["model_tokens"] = _control_tokens_of(settings["model"])
        arguments["last_answer"] = settings["train"]["mask"] == "last_answer"
    if kind is PROMPTS and settings["reward"]["function"] == EXACT_MATCH:
        arguments["answered"] = True  # a missing answer is reported here, not by a rank
    return arguments


def _control_tokens_of(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the control tokens of the tokenizer of section `model`; none if it is not known."""
    if model["kind"] == TOY:
        return SPECIAL_TOKENS
    path, revision = model["path"], model["revision"]
    folder = Path(path or "").expanduser()
    if path and folder.is_dir():
        return tokenizer.control_tokens(lambda name: optional_json(folder / name))
    if not path or folder.exists() or not hub_config(path, revision)[0]:
        return ()
    return tokenizer.control_tokens(lambda name: hub_config(path, revision, name)[0])


def resolve_model(path: str | None, *, revision: str | None = None) -> Path:
    """Return the local folder of a model; a Hugging Face id is downloaded, or read from the cache.

    Raises ConfigError if there is no such folder, and no such model on the Hub.
    """
    if not path:
        raise ConfigError("model=hf needs model.path", hint="model.path=<folder or hub id>")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, ignore_patterns=_NOT_NEEDED))
    except hub_errors() as error:
        raise ConfigError(
            f"model.path={path}: no such folder, and no such model on the hub",
            details=str(error).strip().splitlines()[:3],
            hint="model.path=<folder>, or an id that this machine can download",
        ) from error


def _pretrain(
    out: Path, base: Model, *, log: Log, log_path: Path, on_event: OnEvent | None
) -> None:
    """Run the child process that makes the toy model. Its job file lies beside its log."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    job = log_path.with_suffix(".job.json")
    job.write_text(json.dumps({"out": str(out.resolve()), "steps": base.steps, "seed": base.seed}))
    launch(
        python_child("tasks.toy.pretrain", str(job.resolve())),
        stage="prepare_base",
        log=log,
        log_path=log_path,
        # Threads that spin while waiting make a step ten times slower on shared cores.
        env={"OMP_WAIT_POLICY": "passive"},
        timeout_s=PRETRAIN_TIMEOUT_S,
        on_event=on_event,
    )


def _source(data: Data, entry: Mapping[str, Any], *, key: str) -> Source:
    """Return the source of an entry of `data.sources`, or of `data.path` or `data.name`."""
    kind, name = entry.get("kind") or data.kind, entry["path"]
    if not name:
        wanted = "data.name=<owner/name>" if kind == HUB else f"{key}=<file>"
        raise DataError(f"data={kind} needs {wanted.partition('=')[0]}", hint=wanted)
    if kind in FILE_KINDS:
        existing_file(name, key=key)
    roles = [f.name for f in fields(Columns)]
    columns = {r: value for r in roles if (value := getattr(data, f"{r}_key")) != COMPUTED}
    columns |= {r: value for r in roles if (value := entry.get(f"{r}_key")) is not None}
    return Source(
        name=str(name),
        open=lambda: read_rows(kind, name, split=entry.get("split") or "train"),
        columns=Columns(**columns),
        probability=entry.get("probability"),
        max_samples=entry.get("max_samples"),
    )
