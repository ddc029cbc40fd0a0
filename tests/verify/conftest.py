"""A base with trained adapters, and a real vLLM server on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.verify import mixed
from tests.verify.serving import Running, serve
from tests.witness.conftest import train


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base, and two trainings on it: `base`, `lora`, `qlora` (in 4 bits).

    Texts and conversations begin with a BOS token, as those of Llama do.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    from tasks.toy.pretrain import pretrain

    folder = tmp_path_factory.mktemp("verify")
    base, begin = folder / "base", "<|endoftext|>"
    base.mkdir()
    pretrain(base, steps=120, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(base)
    number = tokenizer.convert_tokens_to_ids(begin)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, number)]
    )
    tokenizer.bos_token = begin
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    tokenizer.save_pretrained(base)
    for kind in ("lora", "qlora"):
        train(base, folder / kind, kind)
    return folder


@pytest.fixture(scope="session")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Start the main server: the base in bf16, both adapters, and one without effect."""
    folder = tmp_path_factory.mktemp("vllm")
    adapters = {name: models / name for name in ("lora", "qlora")}
    adapters["zeros"] = mixed(models / "lora", folder / "zeros", 0.0)
    with serve(models / "base", adapters, log=folder / "server.log") as running:
        yield running
