"""The transformers reference: loads a model from disk and measures it, in a child process.

child            the process, which calls the functions in `requests`
requests         tokens, log-probabilities, errors of layers of a model on disk
load, measure    a model; its fingerprint
rewards          scores of a reward model
"""
