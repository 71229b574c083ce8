"""Tokens for Amazon MSK's IAM access control, signed by AWS's own package. boto3 finds the credentials.

On the wire this is OAUTHBEARER, as in AWS's clients for all languages except Java. The package
(`pip install spark-kafka-sink[aws]`) is imported only when the provider is made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Final

from spark_kafka_sink.common.errors import ConfigError, RetriableError
from spark_kafka_sink.common.security import JaasConfig
from spark_kafka_sink.network.sasl.oauthbearer import TokenProvider

_BROKER: Final = re.compile(r".*\.kafka(?:-serverless)?\.(?P<region>[a-z0-9-]+)\.(?:amazonaws\.com(?:\.cn)?|api\.aws)")
_SESSION_NAME: Final = "spark-kafka-sink"


def region_of(hosts: Iterable[str]) -> str:
    """Return the region in the brokers' names, else AWS_REGION or AWS_DEFAULT_REGION. Raises ConfigError."""
    for host in hosts:
        found = _BROKER.fullmatch(host.lower())
        if found is not None:
            return found["region"]
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        raise ConfigError(
            "sasl.mechanism=AWS_MSK_IAM needs a region, and bootstrap.servers has none in its names: use those that MSK"
            " gives, or set AWS_REGION."
        )
    return region


def msk_token_provider(jaas: JaasConfig | None, region: str) -> TokenProvider:
    """Return a provider that signs with the default credentials, a profile (awsProfileName) or a role (awsRoleArn).

    Raises ConfigError if the package is missing.
    """
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider as signer  # noqa: N813
    except ImportError as error:
        raise ConfigError(
            "sasl.mechanism=AWS_MSK_IAM needs AWS's signer: pip install 'spark-kafka-sink[aws]'."
        ) from error
    options = {name: value.reveal() for name, value in jaas.options} if jaas is not None else {}
    profile, role = options.get("awsProfileName"), options.get("awsRoleArn")
    sign: Callable[[], tuple[str, int]] = lambda: signer.generate_auth_token(region)  # noqa: E731
    if profile:
        sign = lambda: signer.generate_auth_token_from_profile(region, profile)  # noqa: E731
    elif role:
        name = options.get("awsRoleSessionName") or _SESSION_NAME
        sign = lambda: signer.generate_auth_token_from_role_arn(region, role, name)  # noqa: E731

    def provide() -> tuple[str, int]:
        try:
            return sign()
        except Exception as error:  # boto3 has many kinds; their texts may show a key
            kind = type(error).__name__
            raise RetriableError(
                f"AWS's signer gives no token ({kind}): can boto3 find credentials on this machine?"
            ) from None

    return provide
