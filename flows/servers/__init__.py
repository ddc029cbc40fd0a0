"""Prefect's server: embedded in a command, or that of `make up`.

prefect_server  the embedded server, for as long as a command runs
services        the servers that `make up` runs: where they are, and their login
records         ends records of dead runs, and waits until all task runs are recorded
api             JSON over HTTP, without Prefect's or MLflow's client
"""
