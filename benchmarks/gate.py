"""Measure false alarms of the drift checks, and the planted faults that they catch, on the toy.

    python -m benchmarks.gate [--seeds 0 1 2 3 4] [--steps 5 10 20 30 45 60 80 100] [--root DIR]

For every seed and kind of CPU (native bf16, and forced without it) one QLoRA on the toy is trained
by AdamW, in bf16, without DeepSpeed. At each number of steps the adapter is gathered and merged by
the real stages. A failed check is a false alarm. Then faults are written into the merged model: one
module left out, every scale 2 % larger, the base in 16 bits in place of the one in 4. They are
judged by the same checks: drift (profile `standard`), and the sampled rows.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.evaluation.scoring import ModelRef
    from tasks.weights.plan.operations import Plan

STEPS = (5, 10, 20, 30, 45, 60, 80, 100)
CPUS = {"native": {}, "no bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}}
QUANTIZATION = {"type": "nf4", "double_quant": True, "compute_dtype": "bfloat16"}
RANK, BATCH, LR, PROBES = 64, 32, 2e-3, 32
LOG = logging.getLogger("benchmarks.gate")


def main() -> None:
    """Run the sweep and print both rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--root", type=Path, default=Path(".cache/gate"), help="base and results")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # one child's
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    if arguments.seed is not None:
        for row in _train(root, arguments.seed, sorted(arguments.steps)):
            print(json.dumps(row), flush=True)
        return
    _prepare(root)
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for cpu, environment in CPUS.items():
            argv = [sys.executable, "-m", "benchmarks.gate", "--root", str(root), "--seed"]
            argv += [str(seed), "--steps", *map(str, arguments.steps)]
            done = subprocess.run(
                argv, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True,
                check=True,
            )  # fmt: skip
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            rows += [{"cpu": cpu, "seed": seed, **json.loads(line)} for line in lines]
            (root / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
            print(table(rows), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Return both rates by number of steps: false alarms, and faults caught by drift and rows."""
    faults = sorted({name for row in rows for name in row["faults"]})
    lines = [
        f"\n{len(rows)} models; of each fault: caught by drift / by sampled rows / at all",
        f"{'steps':>5} {'models':>7} {'false alarms':>13} {'max KL':>8} {'min top-1':>9} "
        f"{'min same token':>14} " + " ".join(f"{name:>18}" for name in faults),
    ]
    for steps in sorted({row["steps"] for row in rows}):
        some = [row for row in rows if row["steps"] == steps]
        caught: Counter[str] = Counter()
        for row in some:
            for name, by in row["faults"].items():
                caught[f"{name} drift"] += by["drift"]
                caught[f"{name} rows"] += by["rows"]
                caught[name] += by["drift"] or by["rows"]
        rates = [
            f"{caught[f'{name} drift']}/{caught[f'{name} rows']}/{caught[name]} of {len(some)}"
            for name in faults
        ]
        alarms = sum(bool(row["alarms"]) for row in some)
        lines.append(
            f"{steps:>5} {len(some):>7} {alarms:>13} {max(r['mean_kl'] for r in some):>8.1e} "
            f"{min(r['top1'] for r in some):>9.4f} "
            f"{min(r['same_token'] for r in some):>14.4f} "
            + " ".join(f"{rate:>18}" for rate in rates)
        )
    return "\n".join(lines)


def _prepare(root: Path) -> None:
    """Make the toy base and its data, once."""
    from tasks.pipeline.artifact import Origin, publish, staging
    from tasks.prepare import prepare_base, prepare_data

    if not (root / "base").exists():
        with staging(root / "base") as work:
            prepare_base(work, kind="toy", log_path=root / "base.log", log=LOG)
            publish(work, root / "base", Origin("base", "prepare", "base"))
    if not (root / "data").exists():
        with staging(root / "data") as work:
            prepare_data(work, kind="toy", train_size=4000, log=LOG)
            publish(work, root / "data", Origin("dataset", "prepare", "data"))


def _train(root: Path, seed: int, steps: list[int]) -> Iterator[dict[str, Any]]:
    """Train one adapter, and run the gates after each of these numbers of steps."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer

    from tasks.serving.reference.load import load_model

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(root / "base")
    texts = {
        name: [
            tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=False)
            for line in (root / "data" / f"{name}.jsonl").read_text().splitlines()
        ]
        for name in ("train", "heldout")
    }
    model = get_peft_model(
        load_model(root / "base", quantization=QUANTIZATION),
        LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    chosen = random.Random(seed)
    model.train()
    for step in range(1, steps[-1] + 1):
        batch = [torch.tensor(ids) for ids in chosen.sample(texts["train"], BATCH)]
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
        model(input_ids=ids, attention_mask=labels != -100, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                yield {"steps": step, **_judge(model, root, texts["heldout"], Path(folder))}


def _judge(model: Any, root: Path, heldout: list[list[int]], work: Path) -> dict[str, Any]:
    """Gather and merge an adapter; then plant faults in the merged model and check each one."""
    import numpy as np

    from tasks.drift.fingerprint import PROFILES, Fingerprint, drift, within
    from tasks.gather import gather
    from tasks.merge import BASE_INPUT, merge
    from tasks.pipeline.artifact import Origin, publish, staging
    from tasks.weights.adapters.read import read_adapter
    from tasks.weights.execute.execute import execute
    from tasks.weights.files.reader import read_checkpoint
    from tasks.weights.plan.operations import Plan
    from tasks.weights.proof.recheck import recompute, recomputed_check

    base, trained, limit = root / "base", work / "trained", PROFILES["standard"]
    _leave(model, base, trained, heldout)
    judged = {"base": base, "trained": trained, "score": _score, "log": LOG}
    with staging(work / "adapter") as out:
        gathered = gather(out, **judged)
        publish(out, work / "adapter", Origin("adapter", "gather", "adapter"))
    (work / "merged").mkdir()
    merged = merge(
        work / "merged", adapter=work / "adapter", base_mode="auto", profile=limit, **judged
    )
    alarms = [check for check in (*gathered.checks, *merged.checks) if not check.ok]
    plan, caught = Plan.from_json(merged.notes["plan"]), {}
    reference = Fingerprint.load(trained / "fingerprint.fp")
    after = Fingerprint.load(work / "merged" / "fingerprint.fp")
    source = read_checkpoint(base)
    sources = {BASE_INPUT: source, "adapter": read_adapter(work / "adapter").tensors}
    for name, spoiled in _faults(plan).items():
        for old in (work / "merged").glob("model*"):
            old.unlink()
        (work / "merged" / ".journal.jsonl").unlink(missing_ok=True)
        execute(spoiled, sources, work / "merged")
        written = read_checkpoint(work / "merged")
        rows = recomputed_check(recompute(plan, sources, written))
        seen = _fingerprint(work / "merged", reference)
        moved = drift(reference, seen)
        caught[name] = {
            "drift": bool(within(moved, limit)), "rows": not rows.ok, "mean_kl": moved.mean_kl,
        }  # fmt: skip
    assert merged.drift is not None
    measured = asdict(merged.drift)
    best = reference.logprobs.max(axis=1)
    at_id = np.where(reference.ids == after.top1[:, None], reference.logprobs, -np.inf).max(axis=1)
    assert reference.steps is not None
    return {
        "alarms": [f"{check.name}: {check.found}" for check in alarms],
        "mean_kl": measured["mean_kl"],
        "top1": measured["top1_agreement"],
        "same_token": float((reference.top1 == after.top1).mean()),
        "behind_steps": float(((best - at_id) / reference.steps).max()),
        "faults": caught,
    }


def _faults(plan: Plan) -> Mapping[str, Plan]:
    """Return the plan of a merge with each of three faults."""
    changed = [op for op in plan.ops if op.terms]
    left_out = changed[len(changed) // 2].name

    def each(spoil: Any) -> Plan:
        return replace(plan, ops=tuple(spoil(op) for op in plan.ops))

    def original(op: Any) -> Any:
        how = op.quantization
        return op if how is None else replace(op, quantization={**how, "base": "original"})

    return {
        "module left out": each(lambda op: replace(op, terms=()) if op.name == left_out else op),
        "scale 2 % off": each(
            lambda op: replace(
                op, terms=tuple(replace(term, scale=term.scale * 1.02) for term in op.terms)
            )
        ),
        "16-bit base": each(original),
    }


def _leave(model: Any, base: Path, root: Path, heldout: list[list[int]]) -> None:
    """Write a `shards` artifact as a run of one rank leaves it, and the live fingerprint."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from tasks.pipeline.artifact import open_artifact
    from tasks.training.model.probe import PROBE_TOKENS, fingerprint
    from tasks.weights.plan.partitions import rank_file

    tensors = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    (root / "shards").mkdir(parents=True)
    at = {n: {"shape": list(t.shape), "start": 0, "end": t.numel()} for n, t in tensors.items()}
    flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
    path = root / "shards" / rank_file(0, 1)
    save_file(flat, path, metadata={"partitions": json.dumps(at)})
    shapes = {name: {"shape": entry["shape"]} for name, entry in at.items()}
    documents = {
        "partitions.json": {"format": 1, "world_size": 1, "zero_stage": 2, "mode": "adapter",
                            "dtype": "BF16", "parameters": shapes},
        "train.json": {"quantization": QUANTIZATION, "base_digest": open_artifact(base).digest},
    }  # fmt: skip
    for name, document in documents.items():
        (root / name).write_text(json.dumps(document))
    model.peft_config["default"].save_pretrained(root)
    model.config.save_pretrained(root)
    model.generation_config.save_pretrained(root)
    AutoTokenizer.from_pretrained(base).save_pretrained(root / "tokenizer")
    probes = [ids[:PROBE_TOKENS] for ids in heldout[:PROBES]]
    fingerprint(model, probes, torch.device("cpu")).save(root / "fingerprint.fp")


def _score(model: ModelRef, reference: Path, out: Path) -> Any:
    from tasks.drift.fingerprint import Fingerprint

    seen = _fingerprint(
        model.path, Fingerprint.load(reference), adapter=model.adapter,
        quantization=model.quantization, dtype=model.dtype,
    )  # fmt: skip
    seen.save(out)
    return seen


def _fingerprint(path: Path, reference: Any, **how: Any) -> Any:
    from tasks.serving.reference.load import load_model
    from tasks.serving.reference.measure import fingerprint

    return fingerprint(load_model(path, **how), reference)


if __name__ == "__main__":
    main()
