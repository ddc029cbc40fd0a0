"""What runs inside `torchrun`, and the words its parent needs to start it.

    job.py zero_config.py memory.py        no torch: imported by the flow's own process too
    __main__.py lean.py                    a rank's entry
    run.py                                 the order of things within a rank
    model.py engine.py                     base, adapter, quantiser; the DeepSpeed engine
    chat.py batches.py schedule.py         data path and learning rate
    objectives/                            one file an objective
    loop.py checkpoint.py                  training steps, evaluation, last good state
    partitions.py outputs.py probe.py      what a rank leaves behind

The only importer of deepspeed.
"""
