"""Users and permissions of an embedded cluster, changed while it runs, over its PLAINTEXT listener.

A change returns when every server shows it. From then on the servers decide by it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kio.schema.alter_user_scram_credentials.v0 import request as alter_scram
from kio.schema.alter_user_scram_credentials.v0.response import AlterUserScramCredentialsResponse
from kio.schema.create_acls.v3 import request as create_acls
from kio.schema.create_acls.v3.response import CreateAclsResponse
from kio.schema.delete_acls.v3 import request as delete_acls
from kio.schema.delete_acls.v3.response import DeleteAclsResponse
from kio.schema.describe_acls.v3 import request as describe_acls
from kio.schema.describe_acls.v3.response import DescribeAclsResponse
from kio.schema.describe_user_scram_credentials.v0 import request as describe_scram
from kio.schema.describe_user_scram_credentials.v0.response import DescribeUserScramCredentialsResponse
from kio.static.primitive import i8, i32

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.admin import Admin, check
from spark_kafka_sink.local.security import SCRAM_ITERATIONS, salted_password

# Numbers of org.apache.kafka.common.resource.ResourceType, .acl.AclOperation and .security.scram's ScramMechanism.
_RESOURCES: Final = {"topic": 2, "group": 3, "cluster": 4, "transactional_id": 5, "delegation_token": 6}
_OPERATIONS: Final = {
    "all": 2, "read": 3, "write": 4, "create": 5, "delete": 6, "alter": 7, "describe": 8, "cluster_action": 9,
    "describe_configs": 10, "alter_configs": 11, "idempotent_write": 12,
}  # fmt: skip
_MECHANISMS: Final = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
_LITERAL: Final = i8(3)
_PREFIXED: Final = i8(4)
_ALLOW: Final = i8(3)
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Permission:
    """Permission of one principal for one operation, from any host.

    principal: such as `User:alice`, or `User:CN=alice` by certificate. operation: Kafka's name in lower case (`write`,
    `describe`, `idempotent_write`, ...). resource: `topic`, `group`, `cluster`, `transactional_id`,
    `delegation_token`. name: of the resource; `*` for all. is_prefix: for all names that begin with `name`.
    """

    principal: str
    operation: str
    resource: str
    name: str = "kafka-cluster"
    is_prefix: bool = False

    def __post_init__(self) -> None:
        """Raise LocalBrokerError for an operation or resource that Kafka does not have."""
        for what, given, known in (("operation", self.operation, _OPERATIONS), ("resource", self.resource, _RESOURCES)):
            if given not in known:
                raise LocalBrokerError(f"There is no {what} {given!r}: it must be one of {', '.join(known)}.")

    @property
    def pattern(self) -> i8:
        return _PREFIXED if self.is_prefix else _LITERAL

    def as_filter(self) -> dict[str, Any]:
        """Return the fields of a filter that matches only this permission."""
        return {
            "resource_type_filter": i8(_RESOURCES[self.resource]),
            "resource_name_filter": self.name,
            "pattern_type_filter": self.pattern,
            "principal_filter": self.principal,
            "host_filter": "*",
            "operation": i8(_OPERATIONS[self.operation]),
            "permission_type": _ALLOW,
        }


class AccessAdmin:
    """Raises LocalBrokerError if no server answers or a change does not arrive, and the error of a server's code."""

    def __init__(self, bootstrap_servers: str, *, timeout_s: float = 30.0) -> None:
        self._admin = Admin(bootstrap_servers, timeout_s=timeout_s)
        self._servers = [server.strip() for server in bootstrap_servers.split(",")]
        self._timeout_s = timeout_s

    def grant(self, *permissions: Permission) -> None:
        creations = tuple(
            create_acls.AclCreation(
                resource_type=i8(_RESOURCES[each.resource]),
                resource_name=each.name,
                resource_pattern_type=each.pattern,
                principal=each.principal,
                host="*",
                operation=i8(_OPERATIONS[each.operation]),
                permission_type=_ALLOW,
            )
            for each in permissions
        )
        response = self._admin.ask(create_acls.CreateAclsRequest(creations=creations), CreateAclsResponse)
        for permission, result in zip(permissions, response.results, strict=True):
            check(result.error_code, f"{permission} cannot be granted: {result.error_message}")
        for permission in permissions:
            self._await(lambda server, p=permission: self._is_granted(p, server), f"{permission} is not granted")  # type: ignore[misc]

    def revoke(self, *permissions: Permission) -> None:
        filters = tuple(delete_acls.DeleteAclsFilter(**each.as_filter()) for each in permissions)
        response = self._admin.ask(delete_acls.DeleteAclsRequest(filters=filters), DeleteAclsResponse)
        for permission, result in zip(permissions, response.filter_results, strict=True):
            check(result.error_code, f"{permission} cannot be revoked: {result.error_message}")
            self._await(lambda server, p=permission: not self._is_granted(p, server), f"{permission} is still granted")  # type: ignore[misc]

    def set_password(self, user: str, password: str, mechanism: str = "SCRAM-SHA-256") -> None:
        """Let a user log in by SCRAM, or change the password."""
        salt, number = os.urandom(16), _number_of(mechanism)
        # Servers show no password, only its iterations. So a changed password gets another number of them.
        before = self._iterations(user, self._servers[0]).get(number)
        iterations = SCRAM_ITERATIONS + (before == SCRAM_ITERATIONS)
        upsertion = alter_scram.ScramCredentialUpsertion(
            name=user,
            mechanism=number,
            iterations=i32(iterations),
            salt=salt,
            salted_password=salted_password(password, mechanism, salt, iterations),
        )
        self._alter_scram(user, upsertions=(upsertion,))
        self._await(
            lambda server: self._iterations(user, server).get(number) == iterations, f"no such password of {user}"
        )

    def remove_password(self, user: str, mechanism: str = "SCRAM-SHA-256") -> None:
        number = _number_of(mechanism)
        self._alter_scram(user, deletions=(alter_scram.ScramCredentialDeletion(name=user, mechanism=number),))
        self._await(lambda server: number not in self._iterations(user, server), f"{user} still has a password")

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _alter_scram(
        self,
        user: str,
        deletions: tuple[alter_scram.ScramCredentialDeletion, ...] = (),
        upsertions: tuple[alter_scram.ScramCredentialUpsertion, ...] = (),
    ) -> None:
        payload = alter_scram.AlterUserScramCredentialsRequest(deletions=deletions, upsertions=upsertions)
        (result,) = self._admin.ask(payload, AlterUserScramCredentialsResponse).results
        check(result.error_code, f"the password of {user} cannot be changed: {result.error_message}")

    def _iterations(self, user: str, server: str) -> dict[i8, int]:
        """Return the iterations of a user's passwords as a server shows them, by the number of the mechanism."""
        payload = describe_scram.DescribeUserScramCredentialsRequest(users=(describe_scram.UserName(name=user),))
        (result,) = self._admin.ask(payload, DescribeUserScramCredentialsResponse, [server]).results
        return {info.mechanism: int(info.iterations) for info in result.credential_infos}

    def _is_granted(self, permission: Permission, server: str) -> bool:
        payload = describe_acls.DescribeAclsRequest(**permission.as_filter())
        response = self._admin.ask(payload, DescribeAclsResponse, [server])
        check(response.error_code, f"grants cannot be read: {response.error_message}")
        return bool(response.resources)

    def _await(self, condition: Callable[[str], bool], complaint: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        for server in self._servers:
            while not condition(server):
                if time.monotonic() > deadline:
                    raise LocalBrokerError(f"{complaint} on {server} after {self._timeout_s:g} s.")
                time.sleep(_POLL_S)


def _number_of(mechanism: str) -> i8:
    if mechanism not in _MECHANISMS:
        raise LocalBrokerError(f"{mechanism} has no users: it must be one of {', '.join(_MECHANISMS)}.")
    return i8(_MECHANISMS[mechanism])
