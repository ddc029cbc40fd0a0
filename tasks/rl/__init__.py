"""Online reinforcement learning: a policy learns from its own replies. Runs in torchrun's ranks.

    publish -> generate -> score -> measure -> estimate -> update -> publish -> ...

    __main__.py run.py        a rank, and the order of things in it
    loop.py appraisal.py      one iteration, what it notes, when it stops
    prompts.py                what is asked, and when
    rollout.py native.py      who answers; vLLM's part is in tasks/serving/vllm/rollouts.py
    handoff.py                the policy, checked and handed to who answers
    collect.py experience.py  replies and rewards, known to all ranks, in packed rows
    rewards/                  what a reply is worth
    critic.py reference.py    what it is compared with
    algorithms.py             ppo, grpo, rloo ...: choices among
      advantages.py estimators.py policy_loss.py value_loss.py kl.py correction.py overlong.py
    update.py                 optimizer steps over minibatches
    records.py                names and numbers of what is noted

The policy's trained tensors leave as the very `shards` artifact that every other objective leaves,
and go the same way from there. The critic lies beside them in a folder of its own, and no stage of
the way to serving looks into it.
"""
