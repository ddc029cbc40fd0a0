"""Sampling responses from the policy: vLLM or the training module, and the sync of its weights.

engines       the interface, and the choice
policy_sync   weights to the engine, and the checks before it samples
"""
