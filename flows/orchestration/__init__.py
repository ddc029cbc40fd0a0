"""Record a flow run: logs, tracked runs, progress, summary.

flow_run        one run of a flow; `prefect_tasks` runs its stages in Prefect
devices         the GPUs of a stage, which stages of other runs wait for
deployment      what a run that a worker starts may name, and its turn
summary         `<paths.runs>/latest/summary.json`, and the table on the terminal
"""
