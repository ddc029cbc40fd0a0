"""The embedded default: short tasks with known answers, and a small base model that needs training.

world       the tasks: prompts with a right and a wrong answer
splits      pre-training corpus and rows of all kinds, fixed by a seed
dataset     write the rows as a `dataset` artifact
pretrain    pre-train a Qwen2 model of about 1M parameters; uses `tokenizer` and `shape`
__main__    the child process: `python -m tasks.toy job.json`

Training shows an effect within seconds on two CPU cores: the last part of the corpus has flawed
answers, so clean data improves the base model.
"""
