"""The pages of docs/ against the code. To remake the tables of options.md: python tests/unit/test_docs.py"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from spark_kafka_sink.common import config
from spark_kafka_sink.common.config import ProducerConfig, describe_options
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import table_of
from spark_kafka_sink.sink import options
from spark_kafka_sink.sink.options import PASSED_OVER

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OPTIONS = DOCS / "options.md"
TROUBLESHOOTING = DOCS / "troubleshooting.md"
PAGES = sorted(DOCS.glob("*.md"))


# ---- options.md ----------------------------------------------------------------------------------------------------


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *rows))


def settings_table(prefixes: tuple[str, ...], *, inside: bool) -> str:
    """Return the table of settings whose names begin with one of `prefixes`, or of all others."""
    return table(
        ("option", "type", "default", "meaning"),
        [
            (f"`kafka.{row.name}`", row.type, f"`{row.default}`" if row.default else "", row.doc)
            for row in describe_options()
            if row.name.startswith(prefixes) is inside and f"kafka.{row.name}" not in options._REFUSED
        ],
    )


def refused_table() -> str:
    reasons = {f"kafka.{key}": reason for key, reason in config._JAVA_ONLY.items()} | dict(options._REFUSED)
    return table(("option", "why not, and what instead"), [(f"`{key}`", f"{why}.") for key, why in reasons.items()])


def passed_over_list() -> str:
    return "\n" + ", ".join(f"`{name}`" for name in sorted(PASSED_OVER.values())) + ".\n\n"


SECURITY = ("ssl.", "sasl.", "security.")
TABLES = {
    "producer settings": lambda: settings_table(SECURITY, inside=False),
    "security settings": lambda: settings_table(SECURITY, inside=True),
    "refused options": refused_table,
    "passed-over options": passed_over_list,
}


def with_tables(text: str) -> str:
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = before + begin + make() + end + rest.split(end)[1]
    return text


def test_tables_of_options_are_those_of_the_code() -> None:
    text = OPTIONS.read_text()
    assert text == with_tables(text), "stale: python tests/unit/test_docs.py"


def test_every_option_of_the_sink_has_its_row() -> None:
    section = OPTIONS.read_text().split("## The sink's own")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([a-z0-9.]+)` \|", section, re.MULTILINE) == list(options._OPTIONS)


# ---- migrating-from-confluent-kafka.md -----------------------------------------------------------------------------


def settings_of_librdkafka() -> Iterator[tuple[str, list[str]]]:
    """Yield a setting of librdkafka and its names here by the page, without those of the same name."""
    section = (DOCS / "migrating-from-confluent-kafka.md").read_text().split("## Settings")[1]
    for there, here in re.findall(r"^\| (`.+?) \| (.+) \|$", section, re.MULTILINE):
        if names := re.findall(r"`(kafka\.[a-z][a-z0-9.]*)`", here):
            yield from ((name, names) for name in re.findall(r"`([a-z.]+)`", there))


@pytest.mark.parametrize("prefix", ["", "kafka."])
@pytest.mark.parametrize(("there", "here"), list(settings_of_librdkafka()))
def test_librdkafka_setting_is_refused_with_the_name_of_its_page(there: str, here: list[str], prefix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        options.SinkConfig.from_options({"kafka.bootstrap.servers": "h1:9092", f"{prefix}{there}": "1"})
    assert str(refused.value).rpartition("The nearest one is ")[2].removesuffix(".") in here


# ---- troubleshooting.md --------------------------------------------------------------------------------------------


def texts_of(source: str) -> Iterator[str]:
    """Yield every string of a module, with … for the values of an f-string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\{[^{}]*\}|%[ds]", "…", node.value)


def texts_below(folder: Path) -> list[str]:
    """Return texts without the backquotes that mark settings, because errors show none."""
    return [text.replace("`", "") for path in sorted(folder.rglob("*.py")) for text in texts_of(path.read_text())]


def quoted(section: str) -> list[str]:
    """Return the quotes in the headings of a section of troubleshooting.md."""
    body = TROUBLESHOOTING.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [text for line in re.findall(r"^### (.*)$", body, re.MULTILINE) for text in re.findall(r"`([^`]+)`", line)]


@pytest.mark.parametrize("section", ["Before any task", "In a task", "From the brokers"])
def test_every_quoted_text_of_ours_is_in_the_code(section: str) -> None:
    texts = texts_below(ROOT / "spark_kafka_sink")
    found = quoted(section)
    assert found
    assert [text for text in found if not any(text in other for other in texts)] == []


@pytest.mark.parametrize(
    "seen",
    [
        "Node -1 at h1:9092 refuses the login by SASL SCRAM-SHA-512: Authentication failed during …",
        "Not authorized for orders: grant WRITE and DESCRIBE on it.",
        "Attempt 0 of partition 1 comes too late for batch 1: its driver, transactional id 'orders/driver' (…), has …",
    ],
)
def test_error_of_a_task_has_its_heading(seen: str) -> None:
    found = quoted("From the brokers")
    assert [text for text in found if re.search(".+".join(map(re.escape, text.split("…"))), seen)] != []


def test_every_quoted_text_of_spark_is_in_a_test() -> None:
    texts = texts_below(ROOT / "tests" / "integration")
    found = quoted("From Spark")
    assert found
    assert [text for text in found if not any(text in other for other in texts)] == []


# ---- security.md ---------------------------------------------------------------------------------------------------


def redaction(name: str) -> str:
    """Return a setting of Spark that the page gives."""
    (value,) = re.findall(rf"^{re.escape(name)}=(.+)$", (DOCS / "security.md").read_text(), re.MULTILINE)
    return str(value)


PEM = "-----BEGIN ENCRYPTED PRIVATE KEY-----\\nMIICANARY+/=\\nCANARY"
"""As Spark writes it, up to where it may be cut."""


@pytest.mark.parametrize(
    "text",
    [
        """options {\n    key: "kafka.ssl.key.password"\n    value: "CANARY"\n  }\n""",
        """key: "kafka.sasl.jaas.config"\n value: "ScramLoginModule password=\\"a;CANARY\\\\\\"CANARY\\";"\n""",
        f"""key: "kafka.ssl.keystore.key"\n  value: "{PEM}[truncated(size=1704)]"\n""",
        f"""key: "kafka.ssl.keystore.key"\n  value: "{PEM}\\n-----END ENCRYPTED PRIVATE KEY-----\\n"\n""",
        """key: "kafka.sasl.oauthbearer.token.endpoint.url"\n value: "https://idp/?code=CANARY"\n""",
        """key: "kafka.sasl.oauthbearer.client.credentials.client.secret"\n value: "CANARY"\n""",
        "OPTIONS (\n  'kafka.ssl.keystore.key' '-----BEGIN PRIVATE KEY-----\nCANARY\n-----END PRIVATE KEY-----',\n",
        "OPTIONS (\n  'kafka.ssl.key.password' 'CANARY',\n",
        "Map(kafka.ssl.keystore.key -> -----BEGIN RSA PRIVATE KEY-----\nDEK-Info: A-1,2\nCANARY\n-----END RSA",
        "x -> com.acme.OAuthBearerLoginModule required clientId='a'\n clientSecret='CANARY;' scope='CANARY';, y -> 1\n",
    ],
)
def test_documented_redaction_hides_secrets_in_plans(text: str) -> None:
    hidden = re.sub(redaction("spark.sql.redaction.string.regex"), "***", text + "topic: orders")
    assert "CANARY" not in hidden
    assert hidden.startswith(text[:2])


@pytest.mark.parametrize("text", ["Project [password#1, secret#2]\n", 'key: "topic"\n value: "private keys"\n'])
def test_documented_redaction_keeps_other_text(text: str) -> None:
    assert re.sub(redaction("spark.sql.redaction.string.regex"), "***", text) == text


def test_documented_redaction_knows_every_secret_option() -> None:
    secret = {key for key, field in table_of(ProducerConfig).items() if field.metadata.get("is_secret")}
    paths_and_functions = {"ssl.truststore.location", "ssl.keystore.location", "sasl.oauthbearer.token.provider"}
    certificates = {"ssl.truststore.certificates", "ssl.keystore.certificate.chain"}
    secret -= paths_and_functions | certificates
    for name in ("spark.redaction.regex", "spark.sql.redaction.string.regex"):
        assert [key for key in secret if not re.search(redaction(name), f"kafka.{key}")] == []


# ---- all pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_readme_links_every_page(page: Path) -> None:
    assert f"(docs/{page.name})" in (ROOT / "README.md").read_text()


if __name__ == "__main__":
    OPTIONS.write_text(with_tables(OPTIONS.read_text()))
