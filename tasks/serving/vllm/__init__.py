"""vLLM: a child process for smoke tests; an engine inside a rank, or servers, for rollouts.

child            loads folders one after the other and measures each
server           `vllm serve` on loopback, as users start it
rollouts         token ids in, token ids and log-probabilities out
fleet            the servers of a run: started, remote, dealing
reward_engine    scores of a reward model inside a training rank
loaded_weights, loaded_adapter   compare vLLM's weights with those that were sent to it
lora_ops, cpu_linear             faster products on CPUs
"""
