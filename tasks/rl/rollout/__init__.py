"""Sampling responses with vLLM or its servers, and syncing the policy's weights.

engines       the interface of a rollout engine, and the choice of one
policy_sync   checks of the policy before each weight sync
merged        the policy as full weights, for vLLM without an adapter
sync_proof    proves by log-probabilities that servers sample from the version that was synced
"""
