"""Create the bucket of MLflow's artifacts if it does not exist, once the store answers.

Runs in the server image: python make_bucket.py BUCKET. Endpoint and keys: AWS_ENDPOINT_URL,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.
"""

from __future__ import annotations

import sys
import time

import boto3
from botocore.exceptions import ClientError, EndpointConnectionError

PATIENCE_S = 60.0


def make_bucket(name: str) -> None:
    """Create a bucket; an existing one is left as it is.

    Raises:
        EndpointConnectionError: the endpoint does not answer for PATIENCE_S seconds.
        ClientError: the store refuses.
    """
    store = boto3.client("s3")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            store.create_bucket(Bucket=name)
            return
        except ClientError as error:
            if error.response["Error"]["Code"] == "BucketAlreadyOwnedByYou":
                return
            raise
        except EndpointConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


if __name__ == "__main__":
    make_bucket(sys.argv[1])
