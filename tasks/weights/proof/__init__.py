"""Prove that a merged model is `base + scale * B A`, tensor by tensor, from the files alone.

results = recompute(plan, sources, merged)    sampled rows of a merge of ours, in fp64
proof = prove_merge(plan, sources, merged)    all rows of a merge by any tool: the audit's
proof.ok, proof.faults, proof.kept

Shares no arithmetic with the code that merges: `expected` computes the expected rows with numpy,
`unbiased` their rounding, `compare` compares rows, `proof` judges tensors.
"""

from tasks.weights.proof.proof import (
    Planned,
    Proof,
    Recomputed,
    State,
    Verdict,
    planned,
    prove_merge,
    recompute,
    recomputed_check,
)

__all__ = [
    "Planned",
    "Proof",
    "Recomputed",
    "State",
    "Verdict",
    "planned",
    "prove_merge",
    "recompute",
    "recomputed_check",
]
