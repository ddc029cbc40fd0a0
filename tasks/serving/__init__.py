"""Models outside of training: served by vLLM, and measured by transformers as the reference.

    VllmChild().run(jobs, settings, log=log, log_path=path)     vllm/job: smoke tests in a child
    Colocated(how).generate(prompts, seeds, limits)             vllm/rollouts: inside a rank
    Fleet(how, servers).generate(bodies, version)               rollout_servers: over HTTP
    load_model(ModelRef(folder, adapter=...))                   reference/load: in transformers
    fingerprint(model, like)                                    reference/measure
    mlflow.pyfunc.load_model("models:/name@candidate")          registered_model

vllm             a child for smoke tests, the engine of rollouts, `vllm serve` as users start it
rollout_servers  vLLM servers for rollouts: started, or elsewhere
reference        a model by transformers in a child: fingerprints, greedy tokens, rewards
http_server      a server as a child process; `llama_cpp` makes commands for GGUF files
prompts          conversations to token ids and back; loops and exact match in texts
"""
