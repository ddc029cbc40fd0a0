"""From a finished run to a model in use.

gate        conditions on the numbers of a run, judged before the model is registered
lineage     from a served folder back to the rows that it was trained on
model_card  README.md of a served folder
"""
