"""Start the Prefect server, and record a flow run: logs, tracked runs, progress, summary.

prefect_server  the embedded Prefect API, for as long as a command runs
prefect_watch   what a run does when its server is gone, or the run is cancelled in Prefect
services        the servers that `make up` runs: where they are, and their login
devices         the GPUs of a stage, which stages of other runs wait for
deployment      what a run that a worker starts may name, and its turn
flow_run        one run of a flow; `prefect_tasks` runs its stages in Prefect
summary         `<paths.runs>/latest/summary.json`, and the table on the terminal
"""
