"""Prepare a delivery: read SOURCE and base, plan, and refuse what cannot work. Writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.cli.composed import Composed
from flows.delivery.chain import Delivery
from tasks.config.checks import preflight
from tasks.config.checks.machine import smoke_engine
from tasks.config.checks.release import (
    hub,
    prefect_reachable,
    quantizing,
    reachable,
    signing,
)
from tasks.core.errors import ConfigError, PlumblineError, first_and_more
from tasks.core.terminal import typed
from tasks.delivery.base import (
    COMPARE,
    BaseChoice,
    attention_of,
    base_findings,
    base_missing,
    choose_base,
    equals_base,
    find_base,
    undecided,
    value_findings,
)
from tasks.delivery.examination import examine, require_base, require_own_ids
from tasks.delivery.folders import out_findings
from tasks.delivery.plan import Request, Target, Work, prepare
from tasks.delivery.source import ADAPTER_CONFIG, Given, given_adapters
from tasks.delivery.stages import Tokens, find_tokens, side_findings
from tasks.weights.execute.worker import perform
from tasks.weights.execute.writer import parse_size, require_space
from tasks.weights.files.dtypes import check_dtype
from tasks.weights.files.side_files import require_own_files


def prepare_delivery(composed: Composed) -> Delivery:
    """Read SOURCE and base, plan, and run all checks that need no written file.

    Raises:
        ConfigError: the delivery is impossible or refused; nothing was started.
    """
    try:
        return _prepare(composed)
    except ConfigError:
        raise
    except PlumblineError as error:
        raise ConfigError(error.message, details=error.details, hint=error.hint) from error


def _prepare(composed: Composed) -> Delivery:
    settings, store = composed.settings, composed.runs / "artifacts"
    prefect = [] if settings["smoke"]["engine"] == "none" else prefect_reachable()
    tracking = settings["tracking"]
    others = [*signing(settings["register"])]
    others += hub(settings["push"], settings["smoke"]["engine"])
    preflight([*reachable(tracking["uri"]), *prefect, *others])
    target = _target(settings["convert"])
    given, adapters = given_adapters(settings["source"], settings["adapters"])
    sources = [adapter.given for adapter in adapters] or [given]
    base = find_base(given, settings["base"], store)
    if base is not None:
        require_own_files(base)
        if settings["check_base"]:
            require_base(base, whole=not settings["plan"])
    reports = examine(
        [source.root for source in sources],
        base if given.kind != "model" else None,
        check_base=settings["check_base"],
    )
    warnings = tuple(text for source in sources for text in _check_base(source, base, composed))
    out = _folder(settings["out"])
    inputs = [*(source.root for source in sources), *([base] if base is not None else [])]
    findings = list(out_findings(out, inputs=inputs, expected=None, overwrite=True))
    if findings:
        raise ConfigError(first_and_more(findings), details=findings, hint="out=<another folder>")
    choice = _choose_base(sources, base, settings["merge"], store)
    config = settings["adapter_config"]
    request = Request(
        given,
        base,
        target,
        choice.quantization,
        _folder(config) if config else None,
        perform,
        tuple(adapters),
        settings["merge"]["rounding"],
    )
    work = prepare(request)
    preflight(
        list(
            quantizing(
                settings["convert"],
                work.config,
                is_reward=work.is_reward,
                engine=settings["smoke"]["engine"],
            )
        )
    )
    if work.merge is None:
        choice = BaseChoice("")
    elif not choice.mode and settings["merge"]["base"] != COMPARE:
        raise undecided(given, choice)  # a DeepSpeed checkpoint that turned out to be an adapter
    folders = [folder for source in sources for folder in _token_folders(source)]
    tokens = find_tokens([*folders, *([base] if base is not None else [])])
    _refuse_misfits(work, tokens)
    warnings += require_own_ids(tokens.folder)
    attention, unable = attention_of(given, store)
    if settings["smoke"]["engine"] != "none":
        _require_measurable(work, settings["smoke"]["engine"])
        warnings += (unable,) if unable else ()
    for folder in {_existing(composed.runs), _existing(out)}:
        require_space(folder, work.model.nbytes)
    return Delivery(
        settings,
        composed.runs,
        given,
        tuple(adapters),
        None if work.converts else base,  # convert alone needs the base only for its tokenizer
        out,
        work,
        tokens,
        choice,
        attention,
        reports,
        warnings + choice.warnings,
    )


def _target(convert: Mapping[str, Any]) -> Target:
    """Return the dtype and file size to write. Raises ConfigError."""
    return Target(check_dtype(convert["dtype"]), parse_size(convert["max_shard_size"]))


def _require_measurable(work: Work, engine: str) -> None:
    preflight(list(smoke_engine(engine, is_reward=work.is_reward)))
    if not (work.is_causal or work.is_reward):
        names = ", ".join(work.config.get("architectures") or ["no class"])
        raise ConfigError(
            f"smoke.engine={engine}: only causal language models and reward models are measured "
            f"here, this is {names}",
            hint="smoke.engine=none",
        )


def _check_base(given: Given, base: Path | None, composed: Composed) -> tuple[str, ...]:
    """Raise ConfigError for a base that SOURCE was not trained on. Returns warnings.

    With `check_base=false` the reasons for a refusal are returned as warnings.
    """
    if base is None:
        if given.kind == "adapter":
            raise base_missing(given)
        if given.kind == "model":
            return (_NOT_COMPARED,)
        return ()
    if given.kind == "model" and composed.settings["check_base"] and equals_base(given, base):
        raise ConfigError(
            f"source={given.root}: every tensor is that of base={base}, bit for bit: nothing was "
            "merged into it",
            details=list(_adapters_inside(given)),
            hint=f"source=<the adapter> {typed('base', base)}; check_base=false delivers it all "
            "the same",
        )
    findings = list(base_findings(given, base, composed.runs / "artifacts"))
    if given.kind == "model":
        findings += value_findings(given, base)
    if not findings:
        return ()
    if composed.settings["check_base"]:
        raise ConfigError(
            f"wrong base: {first_and_more(findings)}",
            details=findings,
            hint="base=<the base that was trained>; check_base=false takes this one all the same",
        )
    return tuple(findings)


_NOT_COMPARED = (
    "the base was not compared: with base=<folder> a model that equals its base is refused"
)


def _adapters_inside(given: Given) -> Iterator[str]:
    """Yield a line for each adapter in a subfolder, where verl's merger leaves it."""
    for path in sorted(given.root.glob(f"*/{ADAPTER_CONFIG}")):
        yield f"an adapter lies in {path.parent}"


def _choose_base(
    sources: list[Given], base: Path | None, merge: Mapping[str, Any], store: Path
) -> BaseChoice:
    """Choose the base to merge into, the same for all adapters. Raises ConfigError."""
    choices = [choose_base(source, base, merge, store) for source in sources]
    first = choices[0]
    for source, choice in zip(sources, choices, strict=True):
        if source.kind == "adapter" and not choice.mode and merge["base"] != COMPARE:
            raise undecided(source, choice)
    for source, choice in zip(sources[1:], choices[1:], strict=True):
        if (choice.mode, choice.quantization) != (first.mode, first.quantization):
            raise ConfigError(
                f"adapters: {sources[0].root} and {source.root} were trained on the base in "
                "different precisions",
                details=[
                    f"{sources[0].root}: {first.mode}, {first.quantization} ({first.reason})",
                    f"{source.root}: {choice.mode}, {choice.quantization} ({choice.reason})",
                ],
                hint="deliver one of them, and the other into what came out: base=<the first OUT> "
                "check_base=false",
            )
    return first


def _token_folders(given: Given) -> list[Path]:
    """Return the folders that may hold a tokenizer, the best one first."""
    inside = [given.root / "tokenizer"] if given.kind == "shards" else []
    above = [given.root.parent] if given.kind in ("deepspeed", "distributed") else []
    return [*inside, given.root, *above]


def _refuse_misfits(work: Work, tokens: Tokens) -> None:
    findings = list(side_findings(work, tokens))
    if findings:
        raise ConfigError(
            f"tokenizer and model do not fit: {first_and_more(findings)}",
            details=findings,
            hint="put the tokenizer that belongs to the model into SOURCE's folder",
        )


def _folder(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
