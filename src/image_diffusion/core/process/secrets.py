"""Passwords and signatures of URLs, which come from the environment or ~/.netrc, and are never shown."""

from __future__ import annotations

import os
import re
import shlex
from hashlib import sha256
from typing import Any
from urllib.parse import unquote

STORE = "MLFLOW_TRACKING_URI"
"""MLflow's environment variable for the URI of its store, since other users of a machine can see command lines."""

_SECRETS = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")

_URL = re.compile(r"""(?P<scheme>\b[a-zA-Z][\w+.-]*://)(?:[^/\s@'"?#]*@)?(?P<place>[^\s'"?#]*)(?:\?[^\s'"#]*)?""")
_USER = re.compile(r"""\bhttps?://[^/\s@'"?#]*@|://[^/\s:@'"?#]*:[^/\s@'"?#]*@""")
_REFERENCE = r"\$\{[A-Za-z_]\w*\}"
_SECRET = re.compile(
    rf"""://[^\s'"]*[?&](?:[\w.-]*(?:signature|token|secret|passw(?:or)?d|credential|(?:api|access)[_-]?key(?:id)?)"""
    rf"""|sig|key|auth)=(?!{_REFERENCE}(?:[&'"\s]|$))""",
    re.IGNORECASE,
)
_QUERY = re.compile(r"""https?://[^\s'"?#]*\?(?P<query>[^\s'"#]*)""")
_PARAMETER = re.compile(rf"(?:[\w.-]+=)?{_REFERENCE}")


def store_named(uri: str | None) -> str:
    """Return the URI given on a command line, or else that of the environment. The given URI is never shown
    afterwards. Raises ValueError if there is neither."""
    if uri is not None:
        os.environ[STORE] = uri
    if not os.environ.get(STORE):
        raise ValueError(f"No MLflow store is named. Set {STORE}, or use --store.")
    return os.environ[STORE]


def without_password(uri: str) -> str:
    """Return the URI without user, password and query."""
    return re.sub("://.*@", "://", uri).partition("?")[0]


def without_credentials(text: str) -> str:
    """Return a text with every URL without user, password and query."""
    return _URL.sub(lambda match: match["scheme"] + match["place"], text)


def check_no_secrets(data: Any, key: str = "") -> None:
    """Raise ValueError that names the key of plain data whose URL has a user, a password, or a query that grants
    access."""
    if isinstance(data, dict):
        for name, value in data.items():
            check_no_secrets(value, f"{key}.{name}" if key else str(name))
    elif isinstance(data, list):
        for value in data:
            check_no_secrets(value, key)
    elif isinstance(data, str) and _USER.search(data):
        raise ValueError(
            f"{key} has a URL with a user or a password in it ({without_credentials(data)}). Move them to ~/.netrc: "
            f"machine HOST login USER password PASSWORD."
        )
    elif isinstance(data, str) and _SECRET.search(data):
        raise ValueError(_query_advice(key, data))


def check_query(url: str, key: str) -> None:
    """Raise ValueError if a URL, or a URL in a command, has a query that is not read from environment variables."""
    for match in _QUERY.finditer(url):
        if not all(map(_PARAMETER.fullmatch, match["query"].split("&"))):
            raise ValueError(_query_advice(key, url))


def for_shell(url: str) -> str:
    """Return a URL quoted for a POSIX shell, which substitutes the environment variables ${NAME} in it.

    Raises ValueError for a variable that is not set.
    """
    parts = re.split(f"({_REFERENCE})", url)
    for reference in parts[1::2]:
        if reference[2:-1] not in os.environ:
            raise ValueError(f"the environment variable {reference[2:-1]} is not set")
    return "".join(f'"{part}"' if number % 2 else shlex.quote(part) for number, part in enumerate(parts) if part)


def _query_advice(key: str, url: str) -> str:
    return (
        f"{key} has a URL with a query ({without_credentials(url)}), which would be written into results. Remove it, "
        f"or move it to an environment variable and write ?${{NAME}} in its place."
    )


def variable_of(uri: str) -> str:
    """Return the name of the environment variable by which Snakemake passes a store's URI to its jobs. It differs
    between stores, and does not depend on the password."""
    return f"IMAGE_DIFFUSION_STORE_{sha256(without_password(uri).encode()).hexdigest()[:8].upper()}"


def hidden(text: str) -> str:
    """Return a text without passwords from the environment, and with its URLs as in `without_credentials`."""
    uri = os.environ.get(STORE, "")
    credentials = re.findall("://(.*)@", uri)
    passwords = [credential.partition(":")[2] for credential in credentials] + re.findall("password=([^&]*)", uri)
    others = [os.environ.get(name, "") for name in _SECRETS]
    for secret in (*credentials, *passwords, *map(unquote, passwords), *others):  # some messages contain it decoded
        if secret:
            text = text.replace(secret, "***")
    return without_credentials(text)
