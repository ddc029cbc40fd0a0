"""Run a stage: key -> reuse or run -> contract -> manifest -> rename -> log.

    mechanism = Mechanism(store, logs, tracker, call)
    result = mechanism.run(Stage("merge", "weights"), merge, inputs={"base": base}, config={})
    result.artifact.path, result.reused

stage         the mechanism, and what a stage function returns to it
artifact      directories that one stage publishes and the next one reads
locks         who uses a folder of runs, makes an artifact, computes on a device
retention     what a folder of runs still needs; removes the rest
"""
