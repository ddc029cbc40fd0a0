"""Policies in DeepSpeed's engines on two real ranks, sampled by vLLM and by servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import StageProcessError
from tasks.rollout_base import write_rollout_base
from tasks.training.job import Peft, TrainJob, Zero
from tasks.weights.perform import perform
from tests.commands import run_ranks
from tests.settings import Batch, Launch, Loop, Settings
from tests.training.conftest import make_tokenizer, save_base
from tests.training.online import Bench, Run, finish, write_prompts
from tests.training.places import stitched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LORA = Peft(kind="lora", rank=8, alpha=24)
ROLLOUT = {
    "engine": "vllm",
    "temperature": 0.8,
    "max_new_tokens": 16,
    "max_prompt_len": 16,
    "offload_trainer": False,
    "kv_cache_gib": 0.1,
    "max_num_seqs": 64,
}
POLICIES: dict[str, tuple[Peft, int, dict[str, Any]]] = {
    # by name: adapter, ZeRO stage, and what else section `rollout` says
    "lora": (LORA, 2, {}),
    "full": (Peft(), 3, {}),
    "faults": (LORA, 2, {}),
    "qlora": (replace(LORA, kind="qlora"), 2, {}),
    "dora": (replace(LORA, use_dora=True), 3, {}),
    "parallel": (LORA, 2, {"tensor_parallel": 2}),
    # A head of its own, which vLLM computes with an adapter's matrices, too.
    "server-lora": (LORA, 2, {"engine": "server", "servers": 2, "max_num_seqs": 32}),
    "server-full": (Peft(), 3, {"engine": "server", "servers": 2, "max_num_seqs": 32}),
}
APART = ("parallel", "server-lora", "server-full")
"""Policies with a launch of their own: vLLM supports one group size per process."""

FAULTS: dict[str, dict[str, str]] = {
    "lora": {
        "stale adapter": "layers.0.self_attn.q_proj.lora_A.weight",
        "one module left out": "layers.1.self_attn.k_proj.lora_A.weight",
        "adapter lost on wake": "layers.0.self_attn.qkv_proj.lora_A.0",
        "base lost on wake": "model.norm.weight",
        "adapter not used": "[0]",
    },
    "full": {"reload does nothing": "vLLM of rank"},
    "server-lora": dict.fromkeys(("old adapter", "base"), "http://127.0.0.1:"),
    "server-full": {"reload does nothing": "http://127.0.0.1:"},
}
"""The words of the error by fault of `stale_faults.py`; without the fault there is no error."""


def run(
    names: tuple[str, ...], base: Path, folder: Path, *, nproc: int = 2
) -> dict[str, list[dict[str, Any]]]:
    """Return the observations of the ranks for each policy, by name."""
    paths = []
    for name in names:
        out = folder / name
        out.mkdir()
        peft, stage, rollout = POLICIES[name]
        settings = Settings(
            objective="faults" if name == "faults" else "grpo",
            peft=peft,
            zero=Zero(stage=stage),
            batch=Batch(micro_batch_size=1, global_batch_size=2),
            launch=Launch(nproc=nproc),
            online={"rl": vars(Loop()), "rollout": ROLLOUT | rollout, "reward": {}},
        )
        quantization = peft.quantization("bfloat16")
        plain = None
        if quantization is not None:
            plain = folder / f"{name}-base"
            plain.mkdir(parents=True)
            write_rollout_base(plain, base, quantization, dtype="bfloat16", perform=perform)
        job = TrainJob(settings, base, "b", base, out, out, rollout_base=plain)
        job.write(out / "job.json")
        paths.append(str(out / "job.json"))
    try:
        run_ranks("tests.rl.rollout_program", *paths, log_path=folder / "log", ranks=nproc)
    except StageProcessError:
        print((folder / "log").read_text()[-5000:])
        failures = [json.loads(path.read_text()).get("failure") for path in folder.glob("*/rank-*")]
        raise AssertionError("\n".join(filter(None, failures)) or "see above") from None
    return {
        name: [
            json.loads((folder / name / f"rank-{rank}.json").read_text()) for rank in range(nproc)
        ]
        for name in names
    }


@pytest.fixture(scope="module")
def seen(base32: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function for the observations of a policy; the first launch has most of them."""
    launches: dict[tuple[str, ...], dict[str, Any]] = {}

    def of(name: str) -> Any:
        names = (name,) if name in APART else tuple(n for n in POLICIES if n not in APART)
        if names not in launches:
            base = base32
            if name == "server-lora":
                sizes = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
                base = save_base(tmp_path_factory.mktemp("untied"), make_tokenizer(), **sizes)
            try:
                launches[names] = run(names, base, tmp_path_factory.mktemp("rollouts"))
            finally:  # a killed engine leaves its memory there
                for left in Path("/dev/shm").glob("*-cpushm_*"):
                    left.unlink()
        return launches[names][name]

    return of


def require_followed(ranks: list[dict[str, Any]]) -> None:
    """Check that the engine sampled from each version of the policy and from nothing else."""
    for rank in ranks:
        assert rank["unpublished"]
        assert rank["versions"] == [1, 2]
        assert rank["differs"] <= 0.01  # nats; the bar of the mismatch
        # Both compute in bf16, and each is as far from fp32 as from the other: that grows with the
        # weights, to 0.012 after four such changes, whatever was handed over.
        assert rank["differs_after"] <= 0.01
        assert rank["stale"]
        assert rank["stale_differs"] > 0.05, "the change was one that shows"
        assert rank["again"], "same weights, prompts and seeds"
        assert rank["none"], "a rank answers while the other has nothing to do"
        assert rank["ended"]
        assert rank["cut"]
        assert rank["left"] == []
        if "limited" in rank:  # an engine in the rank
            assert rank["limited"], "a limit cuts a response and changes nothing else"
            assert rank["same after sleep"]
            assert rank["undisturbed"] == []
        else:
            assert rank["mismatch"] < 0.01
            assert rank["next version"] == 3
            assert rank["ahead"], "sampled ahead, by the version before"
            assert rank["ahead of version"] == [2]
            assert rank["published"] == 1, "only the last version"
    responses = [tuple(response) for rank in ranks for response in rank["replies"]]
    assert len(responses) == len(set(responses)) == 10, "every response has its own seed"


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "faults"])
def test_engines_follow_all_kinds_of_policies(name: str, seen: Callable[[str], Any]) -> None:
    require_followed(seen(name))
    if name in ("lora", "full"):  # full weights are lost in a sleep
        forgot = ["version 0" in rank["forgot"] for rank in seen(name)]
        assert forgot == [name == "full"] * 2


@pytest.mark.parametrize("name", FAULTS)
def test_weights_that_differ_from_the_synced_ones_are_noticed(
    name: str, seen: Callable[[str], Any]
) -> None:
    for rank in seen(name):
        assert list(rank["faults"]) == [
            text for fault in FAULTS[name] for text in (fault, f"{fault}, then right")
        ]
        for fault, named in FAULTS[name].items():
            assert named in rank["faults"][fault], fault
            assert rank["faults"][f"{fault}, then right"] == ""


def test_weights_that_must_not_be_sampled_from_are_refused(seen: Callable[[str], Any]) -> None:
    for rank in seen("faults"):
        assert "version 2" in rank["refused"]
        assert rank["after refusal"], "never from the base instead"
        assert "lora_A.weight" in rank["contract"]
        assert "lora_A" in rank["not finite"]


def test_an_iteration_trains_on_the_version_before(base32: Path, tmp_path: Path) -> None:
    """GRPO with two servers and one step of staleness, resumed after four of six iterations."""
    rl = {"iterations": 6, "kl_coef": 0.0, "staleness": 1, "mismatch_limit": 0.1}
    rollout = {**ROLLOUT, **POLICIES["server-lora"][2], "max_prompt_len": 40, "max_new_tokens": 8}
    rollout["temperature"] = 1.0
    run = Run(rl, {"objective": "grpo", "dtype": "bfloat16", "save_steps": 4}, rollout)
    for name in ("prompts", "online"):
        (tmp_path / name).mkdir()
    bench = Bench(tmp_path / "online", {"plain": base32}, write_prompts(tmp_path / "prompts"))
    online = finish(bench, {"whole": run, "resumed": replace(run, resumes="whole", at=4)})
    steps, resumed = online.steps["whole"], online.steps["resumed"]
    # Nothing is sampled ahead over the checkpoint after the fourth iteration.
    assert [step["staleness"] for step in steps] == [0, 1, 1, 1, 0, 1]
    assert all(step["mismatch/mean_abs"] < 0.01 for step in steps)
    fresh = [step["off_policy/mean_abs"] for step in steps if not step["staleness"]]
    stale = [step["off_policy/mean_abs"] for step in steps if step["staleness"]]
    assert max(fresh) < 0.01 < min(stale), "the policy's move is no mismatch"
    assert [step["step"] for step in resumed] == [5, 6]
    for ours, theirs in zip(resumed, steps[4:], strict=True):
        assert ours["staleness"] == theirs["staleness"]
        # Servers compute in batches of their own: rounding may change a token.
        assert ours["reward"] == pytest.approx(theirs["reward"], abs=0.02)
    first, second = (stitched(online[name]) for name in ("whole", "resumed"))
    assert max(float((first[n] - second[n]).abs().max()) for n in first) < 1e-3
