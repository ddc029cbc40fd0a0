"""Fingerprints by vLLM request the reference's token ids, not the whole vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tasks.drift.fingerprint import Fingerprint
from tasks.serving.vllm.child import fingerprint

WIDTH, PROBES = 151_936, ((5, 6, 7, 8, 9), (3, 2, 1))


class Engine:
    """vLLM with a runner of either kind, whose model returns random logits."""

    def __init__(self, *, second: bool) -> None:
        from vllm.v1.sample.sampler import Sampler

        config = SimpleNamespace(
            get_vocab_size=lambda: WIDTH, max_logprobs=-1, max_model_len=16, logprobs_mode="raw"
        )
        self.llm_engine = SimpleNamespace(
            model_config=config, vllm_config=SimpleNamespace(use_v2_model_runner=second)
        )
        self.second, self.sampler = second, Sampler()
        draw = torch.Generator().manual_seed(0)
        self.logprobs = {p: torch.randn(len(p) - 1, WIDTH, generator=draw) for p in PROBES}

    def collective_rpc(self, work: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        worker = SimpleNamespace(model_runner=SimpleNamespace(sampler=self.sampler))
        return [work(worker, *args)]

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        (prompt,) = (tuple(prompt_["prompt_token_ids"]) for prompt_ in prompts)
        params._validate_logprobs(self.llm_engine.model_config)
        assert params.prompt_logprobs == int(self.second), "each would be a Python object"
        table, own, scores = self.logprobs[prompt], torch.tensor(prompt[1:]), None
        if self.second:
            ids = torch.from_numpy(params.prompt_logprob_token_ids).long()
            scores = table.gather(1, ids).numpy()
        parts = [
            self.sampler.gather_logprobs(table[at], params.prompt_logprobs, own[at])
            for at in (slice(0, 1), slice(1, None))  # as prompts are read in chunks
        ]
        ids_TK = torch.cat([part.logprob_token_ids for part in parts])
        flat = SimpleNamespace(
            start_indices=[0, *(n * ids_TK.shape[1] for n in range(len(ids_TK)))],
            token_ids=ids_TK.flatten().tolist(),
        )
        return [SimpleNamespace(prompt_logprobs=flat, prompt_token_id_logprobs=scores)]


@pytest.mark.slow
@pytest.mark.parametrize("second", [True, False])
def test_ids_of_a_large_vocabulary(*, second: bool) -> None:
    engine = Engine(second=second)
    table = torch.cat(list(engine.logprobs.values()))
    ids = np.random.default_rng(0).integers(0, WIDTH, (len(table), 512)).astype(np.int32)
    zeros = np.zeros((len(ids), 512), np.float32)
    reference = Fingerprint(PROBES, ids, zeros, ids[:, 0], "deepspeed")
    scored = fingerprint(engine, reference)
    assert (scored.engine, scored.probes) == ("vllm", PROBES)
    assert np.array_equal(scored.ids, ids)
    assert np.array_equal(scored.logprobs, np.take_along_axis(table.numpy(), ids, axis=1))
    assert scored.top1.tolist() == table.argmax(1).tolist()
    assert scored.top1.dtype == np.int32


def test_an_id_that_vllm_does_not_have() -> None:
    ids = np.full((6, 2), WIDTH, np.int32)
    reference = Fingerprint(PROBES, ids, np.zeros((6, 2), np.float32), ids[:, 0], "deepspeed")
    with pytest.raises(ValueError, match=f"scores {WIDTH}"):
        fingerprint(Engine(second=False), reference)
