"""vLLM: a child process for smoke tests, an engine inside a training rank for rollouts.

child         serves folders one after the other and measures each
rollouts      token ids in, token ids and log-probabilities out
loaded_weights, loaded_adapter   what vLLM computes with, compared with what it was sent
"""
