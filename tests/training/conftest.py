"""A tiny real base (Qwen2, byte-level tokenizer, ChatML-like template) and data for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.training.jobs import Trained
    from tests.training.online import Bench, Finished

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer():
    """Return a tokenizer of 256 byte tokens and three special ones, without merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.normalizer = normalizers.NFC()  # which transformers adds to every Qwen2
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


def save_base(path: Path, tokenizer, *, device: str = "cpu", **sizes: object) -> Path:
    """Save a random Qwen2 in bf16 with its tokenizer; `sizes` changes hidden 64 and 2 layers."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    usual = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "tie_word_embeddings": True,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 128,
    }
    config = Qwen2Config(
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(usual | sizes),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def save_experts(path: Path, tokenizer, **sizes: object) -> Path:
    """Save a tiny Qwen2-MoE with its tokenizer: four experts, two for each token, a shared one."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.tiny import tiny

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
               "shared_expert_intermediate_size": 40, "vocab_size": len(tokenizer)}  # fmt: skip
    config = tiny("Qwen2Moe", **experts, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """Qwen2 with hidden 64 and 2 layers, bf16, tied embeddings."""
    return save_base(tmp_path_factory.mktemp("base"), tokenizer)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Path, tokenizer) -> Trained:
    """The jobs of `jobs.py`, by name."""
    from tests.training.jobs import Trained

    return Trained(tmp_path_factory.mktemp("trained"), dataset, tokenizer)


@pytest.fixture
def bench(trained: Trained, tmp_path: Path) -> Bench:
    """A folder for online runs."""
    return trained.bench(tmp_path)


@pytest.fixture(scope="session")
def finished(trained: Trained) -> Finished:
    """The online runs of the default suite."""
    return trained.online


@pytest.fixture(scope="session")
def finished_slowly(trained: Trained) -> Finished:
    """The online runs of slow tests alone."""
    from tests.training.online import SLOW, finish

    return finish(trained.bench(trained.folder / "online"), SLOW)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset of `write_words`."""
    return write_words(tmp_path_factory.mktemp("dataset"))


def write_words(path: Path) -> Path:
    """Write 128 training and 17 evaluation samples: copy a word."""
    draw = random.Random(0)

    def row(i: int) -> dict[str, object]:
        word = "".join(draw.choice("abcdef") for _ in range(draw.randint(3, 6)))
        turns = [("user", f"copy {word}"), ("assistant", word)]
        return {"id": f"s{i}", "messages": [{"role": r, "content": c} for r, c in turns]}

    for split, count in (("train", 128), ("heldout", 17)):
        lines = [json.dumps(row(i)) for i in range(count)]
        (path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return path
