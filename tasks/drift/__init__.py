"""Fingerprints of models, and limits on the drift between two of them.

fingerprint   log-probabilities on fixed probes, and the drift between two fingerprints
reward_scores scores of reward models on fixed probes; `reward_drift` compares two of them
verdict       one check for both kinds
"""
