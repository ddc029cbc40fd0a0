"""vLLM: a child process for smoke tests, and an engine inside a rank for rollouts.

child            loads folders one after the other and measures each
server           `vllm serve` on loopback, as users start it
rollouts         token ids in, token ids and log-probabilities out
loaded_weights, loaded_adapter   compare vLLM's weights with those that were sent to it
lora_ops         faster products of adapters on CPUs
"""
