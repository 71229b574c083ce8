"""A realm for one test: MIT's KDC on the loopback interface, with its database in a folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spark_kafka_sink.local.properties import HOST, ReservedPort

REALM: Final = "EXAMPLE.TEST"
_TOOLS: Final = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit")
_TIMEOUT_S: Final = 20.0


def missing_tools() -> list[str]:
    return [tool for tool in _TOOLS if _tool(tool) is None]


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Realm:
    folder: Path

    @property
    def configuration(self) -> Path:
        """Return the krb5.conf, for clients (KRB5_CONFIG) and for brokers."""
        return self.folder / "krb5.conf"

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "KRB5_CONFIG": str(self.configuration), "KRB5_KDC_PROFILE": str(self.folder / "kdc.conf")}

    def add(self, name: str) -> Path:
        """Add a principal with a random key, and return its keytab."""
        keytab = self.folder / f"{name.replace('/', '-')}.keytab"
        self._kadmin(f"addprinc -randkey {name}@{REALM}")
        self._kadmin(f"ktadd -k {keytab} {name}@{REALM}")
        return keytab

    def change_key(self, name: str) -> None:
        """Change the key of a principal: its keytabs are then invalid."""
        self._kadmin(f"cpw -randkey {name}@{REALM}")

    def ticket(self, name: str, keytab: Path, life: str = "1h") -> str:
        """Return a new ticket cache with the principal's ticket."""
        cache = f"FILE:{self.folder / secrets.token_hex(4)}.cache"
        self.run("kinit", "-k", "-t", str(keytab), "-c", cache, "-l", life, f"{name}@{REALM}")
        return cache

    def run(self, tool: str, *arguments: str) -> None:
        command = [_tool(tool) or tool, *arguments]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def _kadmin(self, query: str) -> None:
        self.run("kadmin.local", "-r", REALM, "-q", query)


@contextlib.contextmanager
def realm(folder: Path) -> Iterator[Realm]:
    port = ReservedPort()
    port.release()  # the KDC refuses a port that another process is bound to
    made = Realm(folder)
    made.configuration.write_text(f"""
[libdefaults]
default_realm = {REALM}
dns_lookup_realm = false
dns_lookup_kdc = false
dns_canonicalize_hostname = false
rdns = false
udp_preference_limit = 1
[realms]
{REALM} = {{
    kdc = {HOST}:{port.number}
}}
[logging]
kdc = FILE:{folder / "kdc.log"}
""")
    (folder / "kdc.conf").write_text(f"""
[realms]
{REALM} = {{
    database_name = {folder / "principals"}
    key_stash_file = {folder / "stash"}
    acl_file = {folder / "acl"}
    kdc_listen = {HOST}:{port.number}
    kdc_tcp_listen = {HOST}:{port.number}
}}
""")
    made.run("kdb5_util", "create", "-s", "-r", REALM, "-P", secrets.token_hex(16))
    with (folder / "output.log").open("wb") as output:
        kdc = subprocess.Popen(
            [_tool("krb5kdc") or "krb5kdc", "-n", "-r", REALM, "-P", str(folder / "pid")],
            env=made.environment,
            stdout=output,
            stderr=output,
        )
    try:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port.number), timeout=1):
                break
            assert kdc.poll() is None, (folder / "output.log").read_text()
            assert time.monotonic() < deadline_s, "the KDC does not listen"
            time.sleep(0.02)
        yield made
    finally:
        kdc.kill()
        kdc.wait()
