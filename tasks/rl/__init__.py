"""Online reinforcement learning: the policy learns from responses that it samples itself.

    setup, progress = set_up(ranks, job, online, ...)          policy, critic, reference
    engine = VllmEngine(Policy(engine, job, ranks), rollout, ...)  or ServerEngine
    engine.sync_weights()                                  and prove it
    responses, cursor = collector.collect(iteration, ...)  sample and score, on all ranks
    experience = pack_experience(responses)                all about one iteration, flat tensors
    experience = scorer.measure(experience)                log-probabilities, values
    experience, metrics = scorer.estimate(experience, ...) advantages, returns
    updater.update(iteration, experience, of=last)         optimizer steps

run, models, loop, update    one training rank, from the models to the artifact
responses, collect           prompts to scored responses
experience, metrics          what is measured on them
algorithms                   the table of algorithms; advantages, losses: formulas
rewards, reward_model        functions, endpoints, a reward model, and the sum of all
environment                  episodes of several turns with the user's environment
user_code                    a function or class of the user, in a process of its own
rollout                      sampling with vLLM, and weight sync
"""
