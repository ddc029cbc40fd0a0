"""vLLM: a child process for smoke tests, and an engine inside a rank for rollouts.

child            loads folders one after the other and measures each
server           `vllm serve` on loopback, as users start it
rollouts         token ids in, token ids and log-probabilities out
loaded_adapter   compares the adapter in vLLM with the one that was sent to it
lora_ops         faster products of adapters on CPUs
"""
