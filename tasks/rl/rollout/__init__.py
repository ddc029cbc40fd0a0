"""Sampling responses with vLLM or its servers, and syncing the policy's weights.

    engine = VllmEngine(Policy(engine, job, ranks), rollout, ends=ends, probes=prompts)
    engine.sync_weights()                          and prove that vLLM has them
    responses = engine.generate(requests)          this rank's, one for each request

engine     the interface of a rollout engine, and vLLM inside each training rank
servers    vLLM servers over HTTP
policy     version, checks and folders of the policy before each weight sync; full weights
proof      proves by log-probabilities that vLLM samples from the version that was synced
"""
