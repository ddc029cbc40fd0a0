"""Record flows and stages in MLflow and TensorBoard; a server that is gone delays records only.

tracker       records of flows; `stage_run` those of one stage
outbox        keeps records on disk, in order, and delivers them once; `journal` is its file
mlflow_server sends them; with `mlflow_registry` the only code that knows MLflow
"""
