"""The proof that a merged model is `base + scale * B A`, tensor by tensor, from the files alone.

proof = prove_merge(plan, sources, merged)       merge.py: every tensor of a plan, with its verdict
proof.ok, proof.counts, proof.faults
plan, sources = planned(base, adapter)           planning.py: what a merge of two folders has to be

Numpy alone, a few MB at a time. `expected.py` computes what has to be there, `compare.py` holds a
tensor against it with tolerances from rounding, `faults.py` names what went wrong.
"""

from tasks.weights.proof.faults import State as State
from tasks.weights.proof.merge import Proof as Proof
from tasks.weights.proof.merge import Verdict as Verdict
from tasks.weights.proof.merge import prove_merge as prove_merge
from tasks.weights.proof.planning import Planned as Planned
from tasks.weights.proof.planning import planned as planned
