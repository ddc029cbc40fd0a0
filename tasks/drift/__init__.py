"""Fingerprints of models, and limits on the drift between two of them.

fingerprint   log-probabilities on fixed probes, and the drift between two fingerprints
reward_scores scores of reward models on fixed probes; `reward_drift` compares two of them
share         share of an adapter that answers, from paired log-probabilities
verdict       one check for both kinds, and the limits of a format
"""
