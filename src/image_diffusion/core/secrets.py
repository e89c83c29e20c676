"""What gives access to an MLflow store comes from the environment, and is never shown."""

from __future__ import annotations

import os
import re
from hashlib import sha256
from urllib.parse import unquote

STORE = "MLFLOW_TRACKING_URI"
"""The environment variable with the store's URI: MLflow's own. A command line is seen by everybody on the machine."""

_SECRETS = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


def store_named(uri: str | None) -> str:
    """The URI that a command line names, which nothing will show from now on; without one, the environment's."""
    if uri is not None:
        os.environ[STORE] = uri
    if not os.environ.get(STORE):
        raise ValueError(f"No MLflow store is named. Set {STORE}, or give --store.")
    return os.environ[STORE]


def without_password(uri: str) -> str:
    """The URI without user, password and query."""
    return re.sub("://.*@", "://", uri).partition("?")[0]


def variable_of(uri: str) -> str:
    """The environment variable in which Snakemake hands a store's URI to its jobs: of several stores, each has its own.
    The password is no part of the name."""
    return f"IMAGE_DIFFUSION_STORE_{sha256(without_password(uri).encode()).hexdigest()[:8].upper()}"


def hidden(text: str) -> str:
    """The text without the passwords that the environment holds."""
    uri = os.environ.get(STORE, "")
    credentials = re.findall("://(.*)@", uri)
    passwords = [each.partition(":")[2] for each in credentials] + re.findall("password=([^&]*)", uri)
    others = [os.environ.get(name, "") for name in _SECRETS]
    for secret in (*credentials, *passwords, *map(unquote, passwords), *others):
        if secret:
            text = text.replace(secret, "***")
    return text
