"""Fingerprints of models, and how far two of them may differ.

fingerprint   log-probabilities on fixed probes, and the distance between two of them
reward_scores the same for reward models; `reward_drift` is their distance
verdict       one check for either kind
"""
