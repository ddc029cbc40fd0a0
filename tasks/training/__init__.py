"""Training inside the ranks that `torchrun` starts. The only importer of deepspeed.

A row is sequences laid end to end, without padding. The model turns it into log-probabilities of
its supervised tokens (or scores), a loss into a number that is a part of the whole step's:

    examples = load_split(job, "train", ...)                      tokens/data
    rows, totals = order.step(n, rank)                            tokens/rows
    row = pack(examples, rows[0].chosen)                          tokens/rows
    output = Output(engine(row=row))                              model/packed_model
    loss, metrics = objective.loss(output, row, totals)           losses
    accumulate(engine, ranks, rows, loss_of); take(engine)        loop, shared with online RL
    save(engine, job, ranks, progress); restore(engine, job)      engine/saving

Who calls them: `__main__` is a rank, `run.train_with` loads and writes (`outputs`), `loop.Trainer`
takes the steps with `passes` and `selection` (best evaluation, early stopping). `job` has settings
and paths, and knows no torch.
"""
