"""The transformers reference: loads a model from disk and measures it, in a child process.

child            the process, which calls the functions in `requests`
load, measure    a model; its fingerprint, greedy tokens, log-probabilities, errors of layers
rewards          scores of a reward model
"""
