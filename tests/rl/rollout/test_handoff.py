"""Weight sync in one process: merged tensors, folders in memory, refusals, sampling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.core.errors import ConfigError, ContractError
from tasks.rl.experience.responses import Request
from tasks.rl.rollout.engines import require_prompts_fit, response_seeds
from tasks.rl.rollout.hf_engine import sample
from tasks.rl.rollout.memory_folder import PREFIX, memory_folder, place_for, sweep
from tasks.rl.rollout.merged import merged_tensors
from tasks.rl.rollout.vllm_support import require_servable, unservable
from tasks.serving.vllm.colocation import room_for_rank
from tasks.training.job import Peft
from tasks.training.model.adapter import lora_config
from tasks.weights.plan.contracts import ModelFacts, facts_of
from tests.rl.peers import alone
from tests.settings import Rollout, Settings
from tests.tiny import tiny


def adapted(peft: Peft, **sizes: Any) -> tuple[Any, ModelFacts]:
    """A model with a trained adapter in fp32, and the facts of its base."""
    import transformers
    from peft import get_peft_model

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(tiny("Qwen2", **sizes))
    facts = facts_of(model)
    if peft.kind == "none":
        return model, facts
    model = get_peft_model(model, lora_config(peft, head="tokens"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    return model, facts


@pytest.mark.parametrize(
    ("peft", "tied"),
    [
        (Peft("lora", rank=4, alpha=6, use_rslora=True, rank_pattern={"q_proj": 2}), True),
        (Peft("lora", rank=4, alpha=6, use_dora=True, target_modules=("q_proj", "v_proj")), False),
        (Peft(), True),
    ],
    ids=["patterns", "dora", "full"],
)
def test_merged_tensors_equal_those_of_peft(peft: Peft, tied: bool) -> None:
    model, facts = adapted(peft, tie_word_embeddings=tied)
    actual = {key: tensor.clone() for key, tensor in merged_tensors(model, facts)}
    merged = model if peft.kind == "none" else model.merge_and_unload()
    wanted = dict(merged.state_dict())
    assert set(actual) == set(wanted), "a tied head among them, under its own key"
    for key, tensor in wanted.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-6, atol=1e-6)


def test_a_missing_tensor_is_named() -> None:
    model, facts = adapted(Peft())
    del model.model.layers[1].mlp.up_proj._parameters["weight"]
    with pytest.raises(ContractError, match=r"layers\.1\.mlp\.up_proj\.weight.*missing"):
        list(merged_tensors(model, facts))


def test_folders_in_memory_are_deleted_and_those_of_dead_processes_too(tmp_path: Path) -> None:
    dead, alive = tmp_path / f"{PREFIX}4194305-x", tmp_path / f"{PREFIX}{os.getpid()}-x"
    unrelated = tmp_path / "something-else"
    for path in (dead, alive, unrelated):
        path.mkdir()
    sweep(tmp_path)
    assert not dead.exists(), "no process can have this number"
    assert alive.exists()
    assert unrelated.exists()
    seen: list[Path] = []

    def broken_off() -> None:
        with memory_folder(alone(), 10) as folder:  # type: ignore[arg-type]
            (folder / "adapter_model.safetensors").write_bytes(b"x")
            seen.append(folder)
            raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        broken_off()
    assert not seen[0].exists()


def test_without_free_memory_the_folder_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    assert place_for(10, tmp_path) == tmp_path
    assert place_for(1 << 60, tmp_path) == tmp_path / "tmp"
    assert place_for(10, tmp_path / "nowhere") == tmp_path / "tmp"


def test_policies_that_vllm_cannot_serve_are_refused() -> None:
    warm, usual = Rollout(temperature=0.7, top_p=0.9), Rollout()
    for settings, rollout, named in (
        (Settings(peft=Peft(kind="lora", rank=1024)), usual, "peft.rank: 1024"),
        (Settings(peft=Peft(kind="lora", rank=320, init="pissa")), usual, "peft.init=pissa"),
        (Settings(peft=Peft("lora", modules_to_save=("lm_head",))), usual, "modules_to_save"),
        (Settings(peft=Peft(kind="lora"), new_tokens=("<a>",)), usual, "model.new_tokens"),
        (Settings(peft=Peft("qlora", target_modules=("embed_tokens",))), usual, "embed_tokens"),
        (Settings(), warm, "rollout.temperature: 0.7"),
    ):
        with pytest.raises(ConfigError, match=named):
            require_servable(settings, rollout)
    for peft in (
        Peft(),
        Peft(kind="lora", rank=512),
        Peft(kind="qlora", rank=256, init="pissa"),
        Peft(kind="lora", rank=1024, use_dora=True),  # goes as weights
    ):
        assert unservable(Settings(peft=peft), Rollout(temperature=0.7)) == []
    assert unservable(Settings(), Rollout(top_p=0.9, top_k=20)) == []
    assert [room_for_rank(rank) for rank in (1, 8, 9, 64, 300, 512)] == [8, 8, 16, 64, 320, 512]
    with pytest.raises(ConfigError, match="512"):
        room_for_rank(513)


def test_prompts_that_do_not_fit_are_named() -> None:
    rollout = Rollout(max_prompt_len=4)
    requests = [Request(np.arange(n, dtype=np.int32), 2, 0) for n in (4, 5, 0)]
    with pytest.raises(ConfigError, match="prompt 1 of rank 3.*5 tok") as e:
        require_prompts_fit(requests, rollout, 3)
    assert len(e.value.details) == 2
    require_prompts_fit(requests[:1], rollout, 3)


def test_every_response_has_its_own_seed() -> None:
    first, second = (response_seeds(Request(np.zeros(1, np.int32), 3, seed)) for seed in (1, 2))
    assert len({*first, *second}) == 6
    assert first == response_seeds(Request(np.zeros(1, np.int32), 3, 1))
    assert response_seeds(Request(np.zeros(1, np.int32), 5, 1))[:3] == first
    assert all(0 <= seed < 2**63 for seed in first)


def test_samples_follow_the_distribution_top_p_and_top_k() -> None:
    probs = torch.tensor([0.1, 0.5, 0.0, 0.3, 0.1], dtype=torch.float64)
    count = 10_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    logprobs = probs.log().expand(count, -1)

    def shares(**cut: Any) -> list[float]:
        drawn = sample(logprobs, uniform, **cut)
        return [round(float(x), 3) for x in torch.bincount(drawn, minlength=5) / count]

    assert shares() == [0.1, 0.5, 0.0, 0.3, 0.1]
    assert shares(top_k=2) == [0.0, 0.625, 0.0, 0.375, 0.0]
    assert shares(top_p=0.75) == [0.0, 0.625, 0.0, 0.375, 0.0]
    assert shares(top_p=0.45) == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert shares(top_k=3, top_p=0.92) == [0.111, 0.556, 0.0, 0.333, 0.0]
    assert shares(top_k=3, top_p=0.85) == [0.0, 0.625, 0.0, 0.375, 0.0], "of what top-k left"
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert sample(logprobs[:2], ends).tolist() == [0, 4], "never a token of probability 0"
