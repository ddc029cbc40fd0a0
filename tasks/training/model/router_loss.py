"""Load-balancing loss of a mixture of experts: E sum_e f_e P_e over the E experts.

Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, eq. 4 to 6, as transformers computes it
(`load_balancing_loss_func`): f_e is the number of times that expert e was chosen and P_e the sum of
its router probabilities, both over all tokens and layers and divided by their number. All tokens of
a row count, prompts too. transformers leaves padding out, and a packed row has none.

A row's loss is not linear in its tokens, so a step's loss depends on how examples are dealt to
rows; each row weighs as much as its share of the step's tokens. Knows no torch when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.training.memory import experts_of

if TYPE_CHECKING:
    import torch

OBJECTIVES = ("sft", "dpo", "orpo", "simpo")
"""Objectives that the router loss can be added to."""
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""Names of the weight of the router loss in config.json."""


def coefficient(config: Mapping[str, Any], wanted: float | None) -> float:
    """Return the weight of the router loss; 0 for a model without experts.

    `wanted` is `train.router_aux_loss_coef`; None takes the weight in config.json.
    """
    text = config.get("text_config") or config
    if experts_of(text) <= 1:
        return 0.0
    if wanted is not None:
        return wanted
    nested = text.get("ffn_config") or {}  # of DBRX
    own = (of.get(name) for of in (text, nested) for name in _COEFFICIENTS)
    return float(next((value for value in own if value), 0.0))


def has_router_loss(family: str) -> bool:
    """Return True if transformers' code of a model type has the load-balancing loss.

    The code is read as text, because importing transformers takes seconds. `doge` and encoders with
    decoders have losses of other forms.
    """
    name = family.removesuffix("_text")
    path = distribution("transformers").locate_file(
        f"transformers/models/{name}/modeling_{name}.py"
    )
    source = Path(str(path))
    known = source.is_file() and family != "doge"
    return known and "def load_balancing_loss_func" in source.read_text(encoding="utf-8")


def load_balancing_loss(
    router_logits: Sequence[torch.Tensor],
    *,
    top_k: int,
    real: int,
    total: int,
    add_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute the router loss of a row.

    Args:
        router_logits: (t, E) of each layer with experts, this rank's tokens.
        top_k: experts of a token.
        real: number of tokens that count; those behind them fill up the rank's part.
        total: tokens of the whole row.
        add_up: sums a tensor over the ranks that share the row; None if they share none.

    Returns:
        A scalar, float32, with gradient.
    """
    import torch

    experts = router_logits[0].shape[-1]
    chosen = router_logits[0].new_zeros(experts, dtype=torch.float32)
    probabilities = torch.zeros_like(chosen)
    for logits in router_logits:
        weights = torch.softmax(logits, dim=-1)
        places = weights.topk(top_k, dim=-1).indices[:real].reshape(-1)
        chosen = chosen + torch.bincount(places, minlength=experts).float()
        probabilities = probabilities + weights[:real].float().sum(dim=0)
    sums = torch.stack([chosen, probabilities])
    if add_up is not None:
        sums = add_up(sums)
    frequency, probability = sums / (total * len(router_logits))
    return experts * (frequency * probability).sum()
