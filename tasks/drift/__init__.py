"""Fingerprints of models, and limits on the drift between two of them.

fingerprint   log-probabilities or reward scores on fixed probes, and the drift between two
verdict       one check for both kinds, limits of a format, share of an adapter that answers
witness       the record that training left in a checkpoint
"""
