"""Online reinforcement learning: the policy learns from responses that it samples itself.

run, setup    one training rank; its models
loop          one iteration: sync weights, sample, score, train
update        optimizer steps on one iteration's responses
rewards       a reward model, a Python function, an HTTP endpoint
environment   episodes of several turns with the user's environment
user_code     a function or class of the user, in a process of its own
rollout       sampling with vLLM, and weight sync
experience    prompts, responses and what is measured on them
algorithms    advantages, losses, KL, correction of the train-inference mismatch
"""
