"""vLLM servers of `rollout=server`: policies and prompts in, token ids and log-probabilities out.

fleet      all servers of a run: publish a policy, score and sample; one queue of prompts
remote     the HTTP requests to one server
started    servers that the run starts on free GPUs or cores
"""
