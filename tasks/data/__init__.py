"""Read the user's data row by row into the `dataset` artifact. Every row is kept or reported.

readers         files and `datasets` ids as rows, each with its file and line
sources         several sources in order, or mixed by probability
columns         names of the user's columns
messages        checked messages, tools, conversations; `control`: control tokens in texts
kinds           kinds of rows (conversations, pairs, prompts, ...) and the objectives that use them
build           `build_dataset`: write train.jsonl and heldout.jsonl, and count all rows
"""
