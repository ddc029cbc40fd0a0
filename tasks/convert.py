"""convert: `weights` -> `served`, a folder that vLLM and transformers load.

Tensors change their dtype and files if the settings say so; otherwise whole files are taken over:
read-only hard links to another artifact of the same store, copies of anything else. The tokenizer,
its template, the generation config and config.json are made consistent: the ids that end a text,
the padding id, the number of rows, the dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.contract import Check, judge
from tasks.drift.fingerprint import DriftLimit
from tasks.evaluation.measuring import Explain, Measuring, stage_report
from tasks.evaluation.model_folder import (
    CONFIG,
    GENERATION_CONFIG,
    Trained,
    computing_dtype_of,
    tokenizer_files,
)
from tasks.evaluation.scoring import ModelRef, Score
from tasks.evaluation.serving_config import ServingConfig, agreement, write_configs
from tasks.pipeline.report import StageReport
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES, check_dtype
from tasks.weights.files.folder import copy_side_file
from tasks.weights.files.reader import WEIGHTS, read_checkpoint
from tasks.weights.files.tensors import Sources, tensor_of
from tasks.weights.heads import Normalisation, reward_config
from tasks.weights.model import Model, model_facts
from tasks.weights.perform import Perform, perform
from tasks.weights.plan import Plan, as_is, with_output
from tasks.weights.tokens.tokenizer import TokenizerFacts, read_tokenizer
from tasks.weights.write import parse_size, write
from tasks.weights.written import Executed, values_read

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
    plan = with_output(as_is(source), source, dtype=DTYPE_NAMES[dtype], max_shard_bytes=limit)
    return write_served(
        out,
        plan,
        {WEIGHTS: source},
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
        log=log,
    )


def write_served(
    out: Path,
    plan: Plan,
    sources: Sources,
    *,
    weights: Path,  # folder of the input, whose fingerprint is the output's if no byte changes
    facts: Model,
    serving: ServingConfig,
    tokenizer: Sequence[Path],  # files to copy
    log: Log,
    judged: bool = False,  # True to compare the plan with `facts`, if its planner has not done so
    notes: Mapping[str, Any] | None = None,
    measuring: Measuring | None = None,
) -> StageReport:
    """Write the tensors and all other files of a served folder, and check that they agree."""
    done = write(plan, sources, out)
    log.info("convert: %d tensors, %d files linked", len(plan.ops), len(done.linked))
    for path in tokenizer:
        copy_side_file(path, out / path.name)
    write_configs(out, serving)
    same = all(tensor_of(op.source, sources).hash == done.checksums[op.name] for op in plan.ops)
    checks = _tensor_checks(plan, done, facts) if judged else values_read(plan, done)
    return stage_report(
        "served",
        out,
        plan,
        done,
        [*checks, *agreement(out, serving, facts, plan)],
        measuring=measuring,
        metrics={"linked": float(len(done.linked))},
        notes={"linked": sorted(done.linked), "drift_carried_over": same, **(notes or {})},
        earlier=weights if same else None,
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


def _tensor_checks(plan: Plan, done: Executed, facts: Model) -> list[Check]:
    """Return a verdict of the contract on each tensor, and on values that are not finite."""
    ops = {op.name: op for op in plan.ops}
    # A tied tensor may be stored a second time; then both have to be equal.
    checks = judge(facts.tensors, {name: op for name, op in ops.items() if name not in facts.tied})
    for name, stored in facts.tied.items():
        if name in ops and stored in ops:
            same = done.checksums[name] == done.checksums[stored]
            checks.append(
                Check(name, f"tied: equal to {stored}", "equal" if same else "other", ok=same)
            )
    return [*checks, *(check for check in values_read(plan, done) if not check.ok)]
