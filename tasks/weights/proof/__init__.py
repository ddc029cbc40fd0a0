"""Prove that a merged model is `base + scale * B A`, tensor by tensor, from the files alone.

proof = prove_merge(plan, sources, merged)       merge.py: check every tensor of a plan
proof.ok, proof.counts, proof.faults
plan, sources = planned(base, adapter)           planning.py: plan the merge of two folders

Uses numpy alone, a few MB at a time. `expected.py` computes the expected tensors, `compare.py`
compares them with the stored ones within rounding error, `faults.py` diagnoses wrong tensors.
"""

from tasks.weights.proof.faults import State as State
from tasks.weights.proof.merge import Proof as Proof
from tasks.weights.proof.merge import Verdict as Verdict
from tasks.weights.proof.merge import prove_merge as prove_merge
from tasks.weights.proof.planning import Planned as Planned
from tasks.weights.proof.planning import planned as planned
