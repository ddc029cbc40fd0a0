"""Record the module calls of a model that vLLM runs, under transformers' names.

vLLM fuses layers: `qkv_proj` is q, k and v of one input, and a norm adds the residual first. The
recording has the parts, so that `tasks/bisect` can replay it in the model by transformers. Modules
without a counterpart of the same name (fused experts, activations) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tasks.serving.vllm.job import CALLS

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Input and output of each module."""


def write_calls(llm: Any, probes: Sequence[Sequence[int]], out: Path) -> None:
    """Run each probe alone and write the calls of all modules to `out / CALLS`.

    The engine runs in this process, without compiled graphs and on one device.
    """
    from safetensors.torch import save_file
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    tensors: dict[str, torch.Tensor] = {}
    for number, probe in enumerate(probes):
        llm.collective_rpc(_start)
        llm.generate([{"prompt_token_ids": list(probe)}], params, use_tqdm=False)
        pairs: Pairs = llm.collective_rpc(_take)[0]
        for name, (input_, output_) in pairs.items():
            tensors[f"{number}/{name}/in"] = input_.cpu().contiguous().clone()  # q, k, v share one
            tensors[f"{number}/{name}/out"] = output_.cpu().contiguous()
    save_file(tensors, out / CALLS)


def _start(worker: Any) -> None:
    """Record the first call of each module of a worker's model from now on."""
    model = worker.get_model()
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    recorded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    arrived: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None and name:
            continue

        def enter(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
            if name not in arrived and name not in recorded:
                arrived[name] = _input([*args, *kwargs.values()])

        def leave(layer: Any, args: Any, output: Any, name: str = name) -> None:
            if name in arrived:
                output_ = output[0] if isinstance(output, tuple) else output
                input_ = arrived.pop(name)
                recorded.update(_parts(name, layer, input_, output_.clone(), fused))

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    worker.module_calls = recorded, handles


def _input(values: Sequence[Any]) -> torch.Tensor:
    """Return the input of a module: its tensor, plus the residual that a fused norm adds."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if len(floats) == 2 and floats[0].shape == floats[1].shape:
        return (floats[0].float() + floats[1].float()).to(floats[0].dtype)
    return (floats or tensors)[0].clone()


def _parts(
    name: str,
    layer: Any,
    input_: torch.Tensor,
    output_: torch.Tensor,
    fused: Mapping[str, list[str]],
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the modules of transformers that a layer computes, with input and output."""
    above, _, last = name.rpartition(".")
    parts = fused.get(last, [])
    sizes = getattr(layer, "output_partition_sizes", None)
    if len(parts) < 2 or sizes is None or len(parts) != len(sizes):
        yield name, (input_, output_)
        return
    for part, rows in zip(parts, output_.split(list(sizes), dim=-1), strict=True):
        yield f"{above}.{part}" if above else part, (input_, rows)


def _take(worker: Any) -> Pairs:
    """Return a worker's recording, with the logits as the output of `lm_head`, and stop."""
    recorded, handles = worker.module_calls
    for handle in handles:
        handle.remove()
    del worker.module_calls
    model = worker.get_model()
    _, hidden = recorded.pop("", (None, None))
    if hidden is not None and hasattr(model, "compute_logits"):
        with torch.no_grad():
            logits = model.compute_logits(hidden)
        if logits is not None:
            recorded["lm_head"] = hidden, logits
    calls: Pairs = recorded
    return calls
