"""Record flows and stages in MLflow and TensorBoard; a server that is gone never stops a run.

tracker       records of flows and of their stages
outbox        the thread that sends them
mlflow_server the only code that knows MLflow, with `mlflow_registry`
"""
