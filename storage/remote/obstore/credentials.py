"""AWS credentials from where boto3 finds them and obstore does not look: profiles and files."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Any, final

_KEPT = timedelta(minutes=5)
"""So long obstore goes on with credentials before it asks for them again."""


@final
class ProfileCredentials:
    """What obstore calls for credentials; botocore renews them where they end."""

    def __init__(self, credentials: Any) -> None:
        """``credentials`` are botocore's."""
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        now = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _KEPT,
        }


def of_profile(profile: str | None) -> tuple[ProfileCredentials, str | None] | None:
    """Return the credentials of a profile, and its region, if it names one.

    None: of nobody's choice, and there are no files, no botocore to read them, or nothing in them.
    ``TypeError`` where a profile was asked for that cannot be had.
    """
    if profile is None and not _are_files_wanted():
        return None
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError as error:
        if profile is None:
            return None
        raise TypeError(
            "engine='obstore' takes profile= only where botocore is installed: pip install botocore"
        ) from error
    try:
        session = Session(profile=profile)
        found = session.get_credentials()
        region = session.get_config_variable("region")
    except BotoCoreError as error:
        raise TypeError(f"the credentials of {profile or 'AWS'} cannot be read: {error}") from error
    return None if found is None else (ProfileCredentials(found), region)


def endpoint_of(profile: str | None) -> str | None:
    """Return the URL of the server that AWS' files name for S3, which is not AWS then.

    None: there are no files, or no botocore, they name none, or the environment does, where obstore
    looks by itself.
    """
    if profile is None and not _are_files_there():
        return None
    if any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")):
        return None
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError:
        return None
    session = Session(profile=profile)
    try:
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            return None
        own: Any = session.get_scoped_config()
        services: Any = session.full_config.get("services", {})
    except BotoCoreError:
        return None  # whoever wants the credentials is told
    of_s3 = services.get(own.get("services"), {}).get("s3", {})
    return of_s3.get("endpoint_url") or own.get("endpoint_url")


def _are_files_wanted() -> bool:
    """Whether AWS' files are where credentials would be looked for, and are there."""
    return "AWS_ACCESS_KEY_ID" not in os.environ and _are_files_there()


def _are_files_there() -> bool:
    named = (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config"))
    paths = (os.environ.get(name) or f"~/.aws/{file}" for name, file in named)
    return "AWS_PROFILE" in os.environ or any(map(os.path.isfile, map(os.path.expanduser, paths)))
