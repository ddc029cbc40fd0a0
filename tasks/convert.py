"""convert: `weights` -> `served`, a folder that vLLM and transformers load.

Tensors change their dtype and files if the settings say so; otherwise whole files are taken over:
read-only hard links to another artifact of the same store, copies of anything else. The tokenizer,
its template, the generation config and config.json are made consistent: the ids that end a text,
the padding id, the number of rows, the dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.contract import Check, judge
from tasks.drift.fingerprint import DriftLimit
from tasks.evaluation.evaluation_prompts import computing_dtype_of
from tasks.evaluation.planned import Explain, Measuring, Planned
from tasks.evaluation.scoring import ModelRef, Score
from tasks.evaluation.serving_config import ServingConfig, agreement, write_configs
from tasks.evaluation.trained_artifact import (
    CONFIG,
    GENERATION_CONFIG,
    Trained,
    tokenizer_files,
)
from tasks.pipeline.report import StageReport
from tasks.weights.execute.outcome import Executed, values_read
from tasks.weights.execute.worker import Perform, perform
from tasks.weights.execute.writer import parse_size
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES, check_dtype
from tasks.weights.files.reader import WEIGHTS, read_checkpoint
from tasks.weights.files.side_files import copy_side_file
from tasks.weights.head_plans import reward_config
from tasks.weights.heads import Normalisation
from tasks.weights.model import Model, model_facts
from tasks.weights.plan import as_is, with_output
from tasks.weights.tokens.tokenizer import TokenizerFacts, read_tokenizer

Log = logging.Logger | logging.LoggerAdapter[Any]


def convert(
    out: Path,
    *,
    weights: Path,
    trained: Path,
    reference: Path,
    dtype: str,
    max_shard_size: str | int,
    score: Score,
    profile: DriftLimit,
    log: Log,
    perform: Perform = perform,
    explain: Explain | None = None,
) -> StageReport:
    """Write a folder that vLLM and transformers load.

    Args:
        out: empty staging directory.
        weights: the `weights` artifact.
        trained: the `shards` artifact, for its tokenizer.
        dtype: "bfloat16", "float16" or "float32".
        max_shard_size: largest tensor data of a file: "5GB", "200MiB", or bytes.

    Returns:
        Report of kind `served`. If all tensors are byte-identical to the input's, the input's drift
        is carried over, and the notes say so.

    Raises:
        ArtifactError: unreadable files, a tokenizer without EOS, a full disk.
        ConfigError: an unknown dtype or size.
    """
    check_dtype(dtype)
    limit = parse_size(max_shard_size)
    tokenizer = read_tokenizer(trained / "tokenizer")
    facts = perform(model_facts, weights, dtype)
    side = Trained.read(trained)
    config, pad = _config_and_pad(weights, side, tokenizer)
    serving = ServingConfig(
        config=config,
        generation=read_json(weights / GENERATION_CONFIG),
        dtype=dtype,
        pad=pad,
        tokenizer=tokenizer,
        template=not side.texts,
    )
    source = read_checkpoint(weights)
    plan = with_output(
        as_is(source), dtype=DTYPE_NAMES[dtype], max_shard_bytes=limit, files=source.files
    )
    planned = PlannedConversion(
        plan=plan,
        sources={WEIGHTS: source},
        measuring=Measuring(
            score,
            reference,
            profile,
            side.attn_implementation,
            before=ModelRef(weights, dtype=computing_dtype_of(weights)),
            explain=explain,
        ),
        weights=weights,
        facts=facts,
        serving=serving,
        tokenizer=tokenizer_files(trained / "tokenizer"),
        judged=True,
    )
    return convert_planned(out, planned, log=log)


@dataclass(frozen=True, kw_only=True)
class PlannedConversion(Planned):
    """A planned conversion."""

    weights: Path  # folder of the input; its fingerprint is that of the output if no byte changes
    facts: Model  # facts of the model
    serving: ServingConfig  # contents of the configuration files
    tokenizer: Sequence[Path]  # files of the tokenizer, to copy
    judged: bool  # True to compare the plan with `facts`; False if the planner has done so


def convert_planned(out: Path, work: PlannedConversion, *, log: Log) -> StageReport:
    """Write the tensors and all other files of a served folder, and check that they agree."""
    facts, serving, sources = work.facts, work.serving, work.sources
    done = work.execute(out)
    log.info("convert: %d tensors, %d files linked", len(work.plan.ops), len(done.linked))
    for path in work.tokenizer:
        copy_side_file(path, out / path.name)
    write_configs(out, serving)
    same = all(
        sources[op.input].checksum(op.key) == done.checksums[op.name] for op in work.plan.ops
    )
    return work.report(
        "served",
        out,
        done,
        [*_tensor_checks(work, done), *agreement(out, serving, facts, work.plan)],
        metrics={"linked": float(len(done.linked))},
        notes={"linked": sorted(done.linked), "drift_carried_over": same},
        earlier=work.weights if same else None,
    )


def _config_and_pad(
    weights: Path, side: Trained, tokenizer: TokenizerFacts
) -> tuple[dict[str, Any], int | None]:
    """Return config.json (without the fields of the output's tensors) and the padding id.

    A reward model reads its score at the last token that is not padding, so a token that ends its
    texts must not be the padding token.
    """
    config = read_json(weights / CONFIG)
    pad = tokenizer.eos if tokenizer.pad is None else tokenizer.pad
    if not side.is_reward:
        return config, pad
    how = side.normalisation or Normalisation()
    config = reward_config(config, config["architectures"][0], how, tokenizer.stops)
    return config, None if pad in tokenizer.stops else pad


def _tensor_checks(work: PlannedConversion, done: Executed) -> list[Check]:
    """Return a verdict on each tensor: of the contract, or on its values if that was judged."""
    values = values_read(work.plan, done)
    if not work.judged:
        return values
    facts, ops = work.facts, {op.name: op for op in work.plan.ops}
    # A tied tensor may be stored a second time; then both have to be equal.
    checks = judge(facts.tensors, {name: op for name, op in ops.items() if name not in facts.tied})
    for name, stored in facts.tied.items():
        if name in ops and stored in ops:
            same = done.checksums[name] == done.checksums[stored]
            checks.append(
                Check(name, f"tied: equal to {stored}", "equal" if same else "other", ok=same)
            )
    return [*checks, *(check for check in values if not check.ok)]
