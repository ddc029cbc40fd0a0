"""Checks of one process: forks, fingerprints, 4-bit values, packed attention."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.gpu.suite import Numbers, Setting

if TYPE_CHECKING:
    import torch

VOCABULARY = 151_936
SHAPE = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""Dimensions of Qwen2.5-1.5B."""


def model_of(setting: Setting, *, dtype: torch.dtype, **changes: Any) -> Any:
    """A random Qwen2 on the device, in eval mode; `changes` of its sizes."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tests.tiny import SIZES

    sizes = {**SIZES, "max_position_embeddings": 4096} if setting.tiny else SHAPE
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(**{**sizes, **changes}), dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval()


def fork(setting: Setting) -> Numbers:
    """Compute in a fork after the imports of the vLLM child, which must not initialise CUDA."""
    import torch

    from tasks.serving.vllm.child import import_vllm

    import_vllm()
    assert not torch.cuda.is_initialized()
    if (pid := os.fork()) == 0:
        ones = torch.ones(64, 64, device=setting.device)
        os._exit(float((ones @ ones).sum()) != 64.0**3)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    return {"status": status}


@dataclass(frozen=True)
class Engine:
    """A model in the place of DeepSpeed's engine around it."""

    module: Any

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def eval(self) -> None:
        self.module.eval()

    def train(self, mode: bool) -> None:
        self.module.train(mode)


def fingerprint(setting: Setting) -> Numbers:
    """Fingerprints on the GPU: repeated, by the scorer, and on the CPU."""
    import torch

    from tasks.drift.fingerprint import EXACT, PROFILES, drift
    from tasks.serving.reference import measure
    from tasks.training.model import probe

    model = model_of(setting, dtype=torch.bfloat16)
    size = model.config.vocab_size
    draw = torch.Generator().manual_seed(1)
    probes = [torch.randint(3, size, (n,), generator=draw).tolist() for n in range(9, 64, 7)]
    device = torch.device(setting.device)
    engine = Engine(model)
    trained = probe.fingerprint_of(engine, probes, device)
    again = drift(trained, probe.fingerprint_of(engine, probes, device))
    model.eval()
    scored = drift(trained, measure.fingerprint(model, trained))
    on_cpu = drift(trained, measure.fingerprint(model.to("cpu"), trained))
    assert again.beyond(EXACT) == []
    assert scored.beyond(EXACT) == []
    assert on_cpu.beyond(PROFILES["standard"]) == []
    return {
        "noise KL": f"{trained.noise:.1e}",
        "repeated KL": f"{again.mean_kl:.1e}",
        "scorer KL": f"{scored.mean_kl:.1e}",
        "CPU KL": f"{on_cpu.mean_kl:.1e}",
        "CPU top-1": f"{on_cpu.top1_agreement:.4f}",
    }


def nf4(setting: Setting) -> Numbers:
    """4-bit values of the device beside those of the CPU, which `merge` computes with.

    Reciprocals and means of scales may be rounded differently there, so that a value that lies
    between two codes takes the other one. More than one in ten thousand would be another format.
    """
    import torch
    from bitsandbytes import functional

    from tasks.weights.quantized.nf4 import BLOCKSIZE, as_trained

    rows, columns = (48, 64) if setting.tiny else (1536, 8960)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=draw).to(torch.bfloat16) * 0.02
    measured: dict[str, float | str] = {}
    for kind in ("nf4", "fp4"):
        for double in (False, True):
            packed, state = functional.quantize_4bit(
                weight.to(setting.device),
                blocksize=BLOCKSIZE,
                compress_statistics=double,
                quant_type=kind,
                quant_storage=torch.uint8,
            )
            theirs = functional.dequantize_4bit(packed, state).cpu()
            ours = as_trained(weight, {"type": kind, "double_quant": double})
            differ = ours != theirs  # the sign of a zero may differ: CUDA decodes -0.0
            measured[f"{kind}{'+dq' if double else ''} differ"] = int(differ.sum())
            assert float(differ.float().mean()) <= 1e-4, measured
    return measured


def attention(setting: Setting) -> Numbers:
    """Packed rows beside each sequence alone in fp32: log-probabilities and gradients.

    In bf16 a packed row may be twice as far from fp32 as the sequences alone are in bf16.
    """
    import torch

    from tasks.training.model.packed_model import accept_packed_rows
    from tasks.training.tokens.rows import pack
    from tests.training.datasets import alone, make_examples

    lengths = [5, 17, 16, 9, 40] if setting.tiny else [1500, 40, 700, 41, 350, 12, 1024, 980]
    examples = make_examples(lengths, vocabulary=96)
    row = pack(examples, range(len(lengths))).to(torch.device(setting.device))
    model = model_of(setting, num_hidden_layers=2, dtype=torch.float32)
    exact = _with_gradients(model, alone(model, examples, setting.device))
    narrow = model_of(setting, num_hidden_layers=2, dtype=torch.bfloat16)
    narrow.load_state_dict(model.state_dict())
    own = _distance(exact, _with_gradients(narrow, alone(narrow, examples, setting.device)))
    measured: dict[str, float | str] = {"bf16 alone": f"{own:.1e}"}
    for name, taught, allowed in (("fp32", model, 1e-4), ("bf16", narrow, 2 * own)):
        accept_packed_rows(taught)
        differs = _distance(exact, _with_gradients(taught, taught(row=row)))
        measured[f"{name} packed"] = f"{differs:.1e}"
        assert differs <= allowed, measured
    return measured


def _with_gradients(model: Any, logprobs: torch.Tensor) -> list[torch.Tensor]:
    import torch

    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
    (logprobs.float() @ weights).backward()
    gradients = [p.grad.float().cpu() for p in model.parameters() if p.grad is not None]
    return [logprobs.detach().float().cpu(), *gradients]


def _distance(exact: list[torch.Tensor], measured: list[torch.Tensor]) -> float:
    """Largest relative distance of a tensor, by its norm."""
    pairs = zip(exact, measured, strict=True)
    return max(float((b - a).norm() / a.norm().clamp(min=1e-9)) for a, b in pairs)
