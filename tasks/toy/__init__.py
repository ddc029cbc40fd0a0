"""The embedded default world: short checkable tasks, and a small model that half knows them.

    world.py      the tasks: what is asked, the right answer, a wrong one
    splits.py     corpus, train, held-out, preferences, prompts: all fixed by a seed
    dataset.py    the splits as a `dataset` artifact
    tokenizer.py  a byte-level BPE with a chat template, trained on the corpus
    pretrain.py   a real Qwen2 class, pre-trained from the seed
    __main__.py   the child process: `python -m tasks.toy job.json`

The world is there to see training work within seconds on two cores: the base model was brought up
on a corpus whose last part has wrong answers, so that clean data visibly improves it.
"""
