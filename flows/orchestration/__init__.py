"""One run of a flow: its task runs, records and summary.

flow_run       logs, the tracked run, and a summary that is written however the run ends
flow_body      runs a flow with a Prefect server; errors become its state, a cancel ends it
prefect_tasks  stages as task runs, with the edges of the flow graph
devices        GPUs that a stage has to itself
progress       the live line, and lines of a log
summary        the summary of a run; `evaluation` has the numbers before and after training
"""
