"""Record a flow run: logs, tracked runs, progress, summary.

flow_run        one run of a flow; `prefect_tasks` runs its stages in Prefect
devices         the GPUs of a stage, which stages of other runs wait for
deployment      runs that a worker starts, and how long runs wait for others
summary         `<paths.runs>/latest/summary.json`, and the table on the terminal
"""
