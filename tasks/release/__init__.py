"""From a finished run to a model in use.

numbers   the numbers that a run measures, by name
gate      conditions on these numbers, judged before the model is registered
lineage   from a served folder back to the rows that it was trained on
model_card  README.md of a served folder
"""
