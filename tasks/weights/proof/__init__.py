"""Prove that a merged model is `base + scale * B A`, tensor by tensor, from the files alone.

proof = prove_merge(plan, sources, merged)       merge.py: check every tensor of a plan
proof.ok, proof.counts, proof.faults
plan, sources = planned(base, adapter)           planning.py: plan the merge of two folders

Uses numpy alone, a few MB at a time. `expected.py` computes the expected tensors, `compare.py`
compares them with the stored ones within rounding error, `faults.py` diagnoses wrong tensors.
"""
