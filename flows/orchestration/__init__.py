"""What surrounds a flow: the Prefect server, the run's record, its progress and its summary.

prefect_server  the embedded API, for as long as a command runs
flow_run        one attempt at a flow: logs, tracked run, summary
summary         `<paths.runs>/latest/summary.json`, and the table on the terminal
"""
