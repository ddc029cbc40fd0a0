"""The transformers reference: loads a model as it lies on disk, and measures it.

child         the process, with one fork per request
load, measure one model, its fingerprint and greedy tokens
"""
