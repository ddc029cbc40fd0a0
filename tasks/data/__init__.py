"""Read the user's data row by row into the `dataset` artifact. Every row is kept or reported.

readers         read files and `datasets` ids into rows, each with its file and line
sources         read several sources in order, or mix them by probability
columns         names of the user's columns
kinds           kinds of rows (conversations, pairs, prompts, ...) and the objectives that use them
messages        check one row as a conversation; `pairs` and `asked` check other kinds
build           write train.jsonl and heldout.jsonl, and count all rows; uses `reading`
"""
