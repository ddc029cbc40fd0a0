"""The servers of `make up` on this machine, from their start to a restored backup.

services       start and stop the Prefect server, the MLflow server and a worker
daemon         background processes that outlive their command
databases      SQLite, or the PostgreSQL of the user
deployments    the work pool without job variables; the deployments of infra/prefect.yaml
automations    the webhook for failed runs
backup         copy all records and artifacts; restore them elsewhere
"""
