"""The servers of `make up` on this machine.

services       start and stop the Prefect server, the MLflow server and a worker
daemon         background processes that outlive their command
"""
