"""Storage options for obstore: its own as they are, and those of the fsspec drivers in its words.

So the same ``storage_options`` serve both engines. What is nested (``client_kwargs``,
``config_kwargs``) goes by names with dots here, as on the command line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from ..asking import deadline_of
from .credentials import endpoint_of, of_profile
from .places import Kind

_CONFIG: dict[Kind, dict[str, str]] = {
    "s3": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "anon": "skip_signature",
        "endpoint_url": "endpoint",
        "requester_pays": "request_payer",
        "client_kwargs.endpoint_url": "endpoint",
        "client_kwargs.region_name": "region",
        "client_kwargs.aws_access_key_id": "access_key_id",
        "client_kwargs.aws_secret_access_key": "secret_access_key",
        "client_kwargs.aws_session_token": "session_token",
        "config_kwargs.region_name": "region",
        "s3_additional_kwargs.ServerSideEncryption": "server_side_encryption",
        "s3_additional_kwargs.SSEKMSKeyId": "sse_kms_key_id",
        "s3_additional_kwargs.BucketKeyEnabled": "sse_bucket_key_enabled",
    },
    "gcs": {"endpoint_url": "base_url"},
    "azure": {
        "anon": "skip_signature",
        "sas_token": "sas_key",
    },
}
"""Names of obstore for names of s3fs, gcsfs and adlfs, where the values are the same."""

_CLIENT: dict[Kind, dict[str, str]] = {
    "s3": {
        "config_kwargs.connect_timeout": "connect_timeout",
        "config_kwargs.read_timeout": "timeout",
        "config_kwargs.user_agent": "user_agent",
    },
    "gcs": {"requests_timeout": "timeout"},
    "azure": {"connection_timeout": "connect_timeout", "read_timeout": "timeout"},
}
"""The same for the HTTP client."""

_NOTHING: dict[Kind, frozenset[str]] = {
    "s3": frozenset(
        [
            "use_listings_cache",
            "skip_instance_cache",
            "listings_expiry_time",
            "max_paths",
            "asynchronous",
            "loop",
            "default_block_size",
            "default_fill_cache",
            "default_cache_type",
            "max_concurrency",
            "fixed_upload_size",
            "cache_regions",
            "config_kwargs.retries.max_attempts",
            "config_kwargs.retries.total_max_attempts",
            "config_kwargs.retries.mode",
            "config_kwargs.max_pool_connections",
            "config_kwargs.request_checksum_calculation",
            "config_kwargs.response_checksum_validation",
        ]
    ),
    "gcs": frozenset(
        [
            "use_listings_cache",
            "skip_instance_cache",
            "asynchronous",
            "loop",
            "project",
            "access",
            "block_size",
            "cache_timeout",
            "consistency",
            "default_location",
            "session_kwargs",
            "timeout",
        ]
    ),
    "azure": frozenset(
        [
            "use_listings_cache",
            "skip_instance_cache",
            "asynchronous",
            "loop",
            "blocksize",
            "default_fill_cache",
            "default_cache_type",
            "max_concurrency",
            "request_session",
            "socket_timeout",
        ]
    ),
}
"""Settings of the drivers' own ways of working, which are none here and change no result."""

_ENDPOINTS = frozenset({"endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url"})
_OWN = ("client_options", "retry_config", "credential_provider", "deadline")
TIMEOUT = timedelta(seconds=60)
"""Of one request, with its body; ``client_options={"timeout": ...}`` is another."""
_SHARE = timedelta(seconds=0.5)
"""Of each second of the deadline: a request that is not answered by then is made again."""
_CONNECT_TIMEOUT = timedelta(seconds=10)


_WORDS_OF_S3FS = frozenset(
    name.partition(".")[0] for name in (*_CONFIG["s3"], *_CLIENT["s3"], *_NOTHING["s3"])
) | {"deadline", "profile", "use_ssl", "version_aware"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a store of obstore is made with."""

    config: dict[str, Any] = field(default_factory=dict[str, Any])
    client: dict[str, Any] = field(default_factory=dict[str, Any])
    retry: dict[str, Any] = field(default_factory=dict[str, Any])
    credential_provider: Any = None


def settings_of(kind: Kind, options: Mapping[str, Any], *, account: str = "") -> Settings:
    """Return what obstore is to be told; ``TypeError`` naming the options that it cannot take.

    What is not known as an option of a driver is taken for one of obstore's own, which refuses
    what it does not know when the store is made.
    """
    own = {name: options[name] for name in _OWN if options.get(name) is not None}
    provider = own.get("credential_provider")
    if provider is None and kind == "gcs" and options.get("token") == "anon":
        # An emulator takes any. Else obstore would ask for one where it writes, anonymous or not.
        provider = _nobody if options.get("endpoint_url") else None
    made = Settings(
        client={
            "allow_http": True,
            "timeout": min(TIMEOUT, _SHARE * deadline_of(options)),
            "connect_timeout": _CONNECT_TIMEOUT,
        },
        retry=dict(own.get("retry_config", {})),
        credential_provider=provider,
    )
    if account:
        made.config["account_name"] = account
    refused: list[str] = []
    for name, value in _flat(options):
        if value is None or name in _NOTHING[kind] or name.partition(".")[0] in _OWN:
            continue
        if name in _CONFIG[kind]:
            made.config[_CONFIG[kind][name]] = value
        elif name in _CLIENT[kind]:
            made.client[_CLIENT[kind][name]] = _duration(value)
        elif not _takes_specially(kind, made, name, value):
            if "." in name:
                refused.append(name)
            else:
                made.config[name] = value
    if refused:
        raise TypeError(f"engine='obstore' does not take these options: {', '.join(refused)}")
    made.client.update(own.get("client_options", {}))
    if kind != "s3":
        return made
    if not made.config.keys() & _ENDPOINTS and (found := endpoint_of(options.get("profile"))):
        made.config["endpoint"] = found
    return made if provider is not None else _with_files(made, options)


def _with_files(made: Settings, options: Mapping[str, Any]) -> Settings:
    """Return settings of S3 with what AWS' own files say, where the options do not."""
    profile = options.get("profile")
    if profile is None and made.config.keys() & {
        *("access_key_id", "aws_access_key_id", "skip_signature", "aws_skip_signature"),
    }:
        return made
    found = of_profile(profile)
    if found is None:
        return made
    provider, region = found
    is_named = {"region", "aws_region"} & made.config.keys() or "AWS_REGION" in os.environ
    config = made.config if is_named or not region else made.config | {"region": region}
    return replace(made, config=config, credential_provider=provider)


def _nobody() -> dict[str, Any]:
    return {"token": "anonymous", "expires_at": None}


def for_s3fs(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return options that lead s3fs to the same place; None if some are in obstore's words."""
    return dict(options) if options.keys() <= _WORDS_OF_S3FS else None


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options by names with dots; those of obstore itself are not looked into."""
    for name, value in options.items():
        whole = f"{prefix}{name}"
        # Of gcsfs a token may be the contents of a key file.
        if isinstance(value, Mapping) and whole not in (*_OWN, "token"):
            nested: Mapping[str, Any] = value
            yield from _flat(nested, f"{whole}.")
        else:
            yield whole, value


def _duration(value: Any) -> Any:
    return timedelta(seconds=value) if isinstance(value, int | float) else value


def _takes_specially(kind: Kind, made: Settings, name: str, value: Any) -> bool:
    """Whether this is an option whose value means something else in obstore's words."""
    if kind == "s3":
        return _takes_of_s3(made, name, value)
    if kind == "gcs":
        return _takes_of_gcs(made, name, value)
    return _takes_of_azure(made, name, value)


def _takes_of_s3(made: Settings, name: str, value: Any) -> bool:
    match name:
        case "use_ssl" | "client_kwargs.use_ssl":
            return bool(value)  # without it, the endpoint says http://
        case "profile":
            pass
        case "version_aware":
            return not value
        case "config_kwargs.s3.addressing_style":
            made.config["virtual_hosted_style_request"] = value == "virtual"
        case "config_kwargs.s3.payload_signing_enabled":
            made.config["unsigned_payload"] = not value
        case "client_kwargs.verify" | "verify":
            if isinstance(value, str):
                made.client["root_certificate"] = _certificates(value)
            else:
                made.client["allow_invalid_certificates"] = not value
        case "config_kwargs.proxies.https" | "config_kwargs.proxies.http":
            made.client["proxy_url"] = value
        case _:
            return False
    return True


def _certificates(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise TypeError(f"the certificates of verify= cannot be read: {error}") from error


def _takes_of_gcs(made: Settings, name: str, value: Any) -> bool:
    if name == "requester_pays":
        return not value
    if name != "token":
        return False
    match value:
        case "anon":
            made.config["skip_signature"] = True
        case "google_default" | "cloud":
            pass  # what obstore looks for by itself
        case str() if os.path.exists(value):
            made.config["application_credentials"] = value
        case Mapping():
            made.config["service_account_key"] = json.dumps(dict(value))
        case _:
            raise TypeError(
                "engine='obstore' takes as token 'anon', 'google_default', 'cloud', the path of a "
                "key file or what is in one; pass obstore's credential_provider= for other ones"
            )
    return True


def _takes_of_azure(made: Settings, name: str, value: Any) -> bool:
    if name == "connection_string":
        made.config.update(_connection(str(value)))
        return True
    if name == "credential" and isinstance(value, str):
        made.config["account_key"] = value
        return True
    if name == "location_mode":
        return value == "primary"
    return False


def _connection(text: str) -> dict[str, Any]:
    """Return what Azure's connection string says; TypeError if it is none."""
    pairs = [part.partition("=") for part in text.split(";") if part]
    if not all(sign for _, sign, _ in pairs):
        raise TypeError("bad connection_string: expected Name=value;Name=value;...")
    parts = {name.lower(): value for name, _, value in pairs}
    known = {
        "accountname": "account_name",
        "accountkey": "account_key",
        "blobendpoint": "endpoint",
        "sharedaccesssignature": "sas_key",
    }
    config: dict[str, Any] = {known[key]: parts[key] for key in known if key in parts}
    suffix = parts.get("endpointsuffix", "core.windows.net")
    if suffix != "core.windows.net":  # of a cloud of its own
        protocol = parts.get("defaultendpointsprotocol", "https")
        account = config.get("account_name", "")
        config.setdefault("endpoint", f"{protocol}://{account}.blob.{suffix}")
    if parts.get("usedevelopmentstorage", "").lower() == "true":
        config["use_emulator"] = True
    return config
