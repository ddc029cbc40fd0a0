"""Policies in DeepSpeed's engines, sampled by vLLM and by the trainer itself, on two real ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import StageProcessError
from tasks.rollout_base import write_rollout_base
from tasks.training.job import Peft, TrainJob, Zero
from tasks.weights.execute.worker import perform
from tests.commands import run_ranks
from tests.settings import Batch, Launch, Loop, Settings
from tests.training.conftest import make_tokenizer, save_base

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
    "lora": (LORA, 2, {"max_num_seqs": 256}),
    "full": (Peft(), 3, {}),
    "native": (LORA, 3, {"engine": "transformers", "max_num_seqs": 4}),
    "faults": (LORA, 2, {}),
    "lora-zero3": (
        replace(LORA, use_rslora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 8.0}),
        3,
        {},
    ),
    "qlora": (replace(LORA, kind="qlora"), 2, {}),
    "dora": (replace(LORA, use_dora=True), 3, {}),
    "qdora": (replace(LORA, kind="qlora", use_dora=True), 2, {}),
    "full-zero2": (Peft(), 2, {}),
    "parallel": (LORA, 2, {"tensor_parallel": 2}),
    "native-full": (Peft(), 3, {"engine": "transformers", "max_num_seqs": 4}),
    "native-qlora": (replace(LORA, kind="qlora"), 2, {"engine": "transformers"}),
    "torn": (LORA, 2, {"tensor_parallel": 2}),
}
DEFAULT = ("lora",)
SHARED = ("parallel", "torn")
"""Engines shared by several ranks: vLLM supports one group size per process."""
BROKEN = ("faults", "torn")
"""Policies with faults, see `rollout_program.py`."""


OTHERS = "does not compute with version"
CHANGED = "weights have changed since version"
FAULTS: dict[str, dict[str, tuple[str, ...]]] = {
    "lora": {
        "stale adapter": (OTHERS, "layers.0.self_attn.q_proj.lora_A.weight: ", "(and 27 more)"),
        "slots not filled": (OTHERS, "(and 27 more)"),
        "no module bound": (OTHERS, "none of the 28 tensors is bound to a layer"),
        "one module left out": (
            OTHERS,
            "layers.1.self_attn.k_proj.lora_A.weight: ",
            "(and 1 more)",
        ),
        "adapter lost on wake": (
            CHANGED,
            "layers.0.self_attn.qkv_proj.lora_A.0: ",
            "(and 27 more)",
        ),
        "base lost on wake": (CHANGED, "model.norm.weight: 128 of 128 numbers differ"),
        "adapter not used": ("vLLM answered with adapters [0] (0: the base alone)",),
    },
    "full": {
        "reload does nothing": (OTHERS, "model.embed_tokens.weight: ", "more)"),
        "one tensor left out": (OTHERS, "model.layers.1.self_attn.k_proj.weight: "),
        "base reloaded on wake": (CHANGED, "model.embed_tokens.weight: ", "more)"),
    },
    "native": {"adapter off": ("would not be sampled from", "layers.0.self_attn.q_proj: ")},
}
"""Parts of the error for each fault of `stale_faults.py`. Without the fault there is no error."""


@pytest.fixture(scope="session")
def base32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with heads of 32, vLLM's smallest on a CPU; tied embeddings."""
    path = tmp_path_factory.mktemp("base32")
    return save_base(path, make_tokenizer(), hidden_size=128, intermediate_size=256)


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
            objective=name if name in BROKEN else "grpo",
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
        run_ranks("tests.rl.rollout.rollout_program", *paths, log_path=folder / "log", ranks=nproc)
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


@pytest.fixture(scope="session")
def seen(base32: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(DEFAULT, base32, tmp_path_factory.mktemp("rollouts"))


@pytest.fixture(scope="session")
def seen_slowly(base32: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = tuple(name for name in POLICIES if name not in (*DEFAULT, *SHARED))
    return run(names, base32, tmp_path_factory.mktemp("more_rollouts"))


def require_followed(ranks: list[dict[str, Any]]) -> None:
    """Check that the engine sampled from each version of the policy and from nothing else."""
    for rank in ranks:
        assert "before the policy was synced" in rank["unpublished"]
        assert rank["versions"] == [1, 2]
        assert rank["differs"] <= 0.01  # nats; the bar of the mismatch
        # Both compute in bf16, and each is as far from fp32 as from the other: that grows with the
        # weights, to 0.012 after four such changes, whatever was handed over.
        assert rank["differs_after"] <= 0.01
        assert rank["other weights"] == [], "what is computed with are the policy's very bits"
        assert rank["behind"] <= 0.05, "greedy tokens are the trainer's, up to ties in bf16"
        assert "version 1 of the policy, which has changed since" in rank["stale"]
        assert rank["stale_differs"] > 0.05, "the change was one that shows"
        assert rank["again"], "same weights, prompts and seeds"
        assert rank["limited"]["prefixes"], "a limit cuts a response and changes nothing else"
        assert rank["limited"]["longest"] == [True]
        assert "has 30 tokens; rollout.max_prompt_len=16" in rank["limited"]["too long"]
        assert all(rank["ended"])
        assert all(rank["cut"])
        assert rank["left"] == []
        assert rank["slept"]["same"]
        assert rank["undisturbed"] == []
    none = [rank["none"] for rank in ranks]
    assert none == [[], True][: len(ranks)], "a rank answers while the other has nothing to do"


def require_varied(ranks: list[dict[str, Any]]) -> None:
    responses = [tuple(response) for rank in ranks for response in rank["replies"]]
    assert len(responses) == 10
    assert len(set(responses)) == 10, "every response has its own seed"


@pytest.mark.parametrize("name", DEFAULT)
def test_an_engine_follows_the_policy(name: str, seen: dict[str, Any]) -> None:
    require_followed(seen[name])
    require_varied(seen[name])


def require_faults(ranks: list[dict[str, Any]], expected: dict[str, tuple[str, ...]]) -> None:
    for rank in ranks:
        assert list(rank["faults"]) == [
            name for fault in expected for name in (fault, f"{fault}, then right")
        ]
        for fault, texts in expected.items():
            assert [text for text in texts if text not in rank["faults"][fault]] == [], fault
            assert (
                "rollout=transformers" in rank["faults"][fault] or "report" in rank["faults"][fault]
            )
            assert rank["faults"][f"{fault}, then right"] == ""


def test_an_adapter_survives_a_sleep(seen: dict[str, Any]) -> None:
    assert [rank["slept"]["forgot"] for rank in seen["lora"]] == ["", ""]


@pytest.mark.slow
def test_full_weights_have_to_be_synced_after_a_sleep(seen_slowly: dict[str, Any]) -> None:
    for rank in seen_slowly["full"]:
        assert "holds version 0 of the policy (0: none)" in rank["slept"]["forgot"]
        assert "synced again" in rank["slept"]["forgot"]


@pytest.mark.parametrize("name", DEFAULT)
def test_weights_that_differ_from_the_synced_ones_are_noticed(
    name: str, seen: dict[str, Any]
) -> None:
    require_faults(seen[name], FAULTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in DEFAULT])
def test_weights_are_compared_for_every_kind_of_policy(
    name: str, seen_slowly: dict[str, Any]
) -> None:
    require_faults(seen_slowly[name], FAULTS[name])


@pytest.mark.slow
def test_more_prompts_than_vllm_reads_at_once(seen: dict[str, Any]) -> None:
    assert [rank["crowd"] for rank in seen["lora"]] == [[1] * 200] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in POLICIES if n not in (*DEFAULT, *SHARED, *BROKEN)])
def test_engines_follow_all_kinds_of_policies(name: str, seen_slowly: dict[str, Any]) -> None:
    require_followed(seen_slowly[name])
    require_varied(seen_slowly[name])


@pytest.fixture
def no_shared_memory() -> Iterator[None]:
    """Remove what vLLM's shared engines leave in /dev/shm when they are killed."""
    for when in ("before", "after"):
        for left in Path("/dev/shm").glob("*-cpushm_*"):
            left.unlink()
        if when == "before":
            yield


@pytest.mark.slow
@pytest.mark.usefixtures("no_shared_memory")
def test_a_shared_engine_follows_the_policy(base32: Path, tmp_path: Path) -> None:
    seen = run(("parallel",), base32, tmp_path)["parallel"]
    require_followed(seen)
    require_varied(seen)


@pytest.mark.slow
def test_a_failed_engine_says_why(seen_slowly: dict[str, Any]) -> None:
    for number, rank in enumerate(seen_slowly["faults"]):
        assert "the rollout engine does not start" in rank["no start"]
        assert "No available memory for the cache blocks" in rank["no start"]
        assert "rollout.kv_cache_gib" in rank["no start"]
        assert f"prompt 1 of rank {number} (0 1 2 3 4 5 6 7 ...) has 17 tokens" in rank["long"]
        assert "Unsupported CPU attention configuration" in rank["broken"]
        assert "refuses version 2" in rank["refused"]
        assert "rollout=transformers" in rank["refused"]
        assert "has to be synced again" in rank["after refusal"], "never from the base instead"
        assert "lora_A.weight: expected BF16 [8, 128], found BF16 [8, 127]" in rank["contract"]
        assert "not finite, first" in rank["not finite"]
        assert "lora_A" in rank["not finite"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_shared_memory")
def test_a_failure_in_a_shared_engine_ends_the_run(base32: Path, tmp_path: Path) -> None:
    """Otherwise the other rank would wait half an hour."""
    began = time.monotonic()
    with pytest.raises(AssertionError, match="the rollout engine broke down"):
        run(("torn",), base32, tmp_path)
    assert time.monotonic() - began < 900  # not the half hour that the other rank may wait
    assert not (tmp_path / "torn" / "rank-1.json").exists()
