"""Models outside of training: served by vLLM, and measured by transformers as the reference.

vllm          smoke tests in a child process, rollouts inside training ranks
rollout_servers  vLLM servers over HTTP, for rollouts
reference     fingerprints, greedy tokens and rewards by transformers
registered_model  a registered model in MLflow's `pyfunc.load_model`
prompts       conversations to token ids and back
text          loops and exact match in generated text
forks         forks that can still use a GPU
"""
