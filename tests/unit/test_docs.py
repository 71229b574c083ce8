"""The pages of docs/ against the code. `python tests/unit/test_docs.py` writes the tables of options.md and
api/errors.md again.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

import spark_kafka_sink
from spark_kafka_sink import local
from spark_kafka_sink.common import config, errors
from spark_kafka_sink.common.config import ProducerConfig, describe_options
from spark_kafka_sink.common.errors import ConfigError, KafkaError
from spark_kafka_sink.common.options import table_of
from spark_kafka_sink.local import pytest_plugin
from spark_kafka_sink.serialization import format_options
from spark_kafka_sink.serialization.registry_settings import RegistrySettings, registry_options
from spark_kafka_sink.sink import options
from spark_kafka_sink.sink.options import PASSED_OVER

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OPTIONS = DOCS / "options.md"
ERRORS = DOCS / "api" / "errors.md"
REGISTRY = DOCS / "schema-registry.md"
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


def registry_table() -> str:
    rows = [(f"`{row.name}`", row.type, f"`{row.default}`", row.doc) for row in registry_options()]
    return table(("option", "type", "default", "meaning"), rows)


def with_tables(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    for name, make in tables.items():
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


def test_every_option_of_formats_is_on_its_page() -> None:
    rows = [line for line in (DOCS / "serialization.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split(" | ")[0])}
    assert set(format_options.OPTIONS) - named == set()
    assert {name for name in named if "." in name} - set(format_options.OPTIONS) == set()


def test_table_of_the_registrys_options_is_that_of_the_code() -> None:
    text = REGISTRY.read_text()
    assert text == with_tables(text, {"registry settings": registry_table}), "stale: python tests/unit/test_docs.py"


# ---- api/ ----------------------------------------------------------------------------------------------------------


def error_rows(parent: type[KafkaError], depth: int = 0) -> Iterator[tuple[str, ...]]:
    """Yield the row of each class below `parent`, each followed by the rows of those below it."""
    for each in parent.__subclasses__():
        if vars(errors).get(each.__name__) is not each:  # of another module, or made by of_pickling in another test
            continue
        code = "" if "error_code" not in vars(each) else str(each.error_code)
        text = (
            each.sentence
            if "sentence" in vars(each)
            else " ".join(inspect.cleandoc(each.__doc__ or "").split("\n\n")[0].split())
        )
        marks = ("yes" if each.retriable else "", "yes" if each.fatal else "")
        yield ("&emsp;" * depth + f"`{each.__name__}`", code, *marks, text.replace("*", chr(92) + "*"))
        yield from error_rows(each, depth + 1)


def errors_table() -> str:
    return table(("class", "code", "retriable", "fatal", "meaning"), error_rows(KafkaError))


def test_table_of_errors_is_that_of_the_code() -> None:
    text = ERRORS.read_text()
    assert text == with_tables(text, {"errors": errors_table}), "stale: python tests/unit/test_docs.py"


@pytest.mark.parametrize("package", [spark_kafka_sink, local])
def test_each_public_name_has_its_place_in_the_api_pages(package: ModuleType) -> None:
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^::: \S+\.(\w+)$", pages, re.MULTILINE) + re.findall(
        r"^\| (?:&emsp;)*`(\w+)`", pages, re.MULTILINE
    )
    assert set(package.__all__) - set(documented) == set()


def documented_classes() -> Iterator[ast.ClassDef]:
    """Yield the syntax tree of each class of the API pages."""
    for page in sorted((DOCS / "api").glob("*.md")):
        for path in re.findall(r"^::: ([\w.]+\.[A-Z]\w+)$", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
            yield from (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


@pytest.mark.parametrize("tree", list(documented_classes()), ids=lambda tree: tree.name)
def test_docstrings_of_the_api_pages_have_no_html(tree: ast.ClassDef) -> None:
    """Bug: `array<struct<...>>` without backquotes lost its inner part on the page, because a browser reads a tag."""
    nodes: list[ast.ClassDef | ast.FunctionDef] = [tree]
    nodes += [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    for node in nodes:
        text = re.sub(r"`[^`]*`|^    .*$", "", ast.get_docstring(node) or "", flags=re.MULTILINE)
        assert re.findall(r"<[a-zA-Z/].*", text) == [], node.name


def test_each_fixture_of_the_plugin_has_its_place_in_the_api_pages() -> None:
    source = Path(pytest_plugin.__file__).read_text()
    fixtures = re.findall(r"@pytest\.fixture.*\ndef (\w+)", source)
    (members,) = re.findall(
        r"pytest_plugin\n(?:    .*\n)*?      members: \[(.*)\]", (DOCS / "api" / "testing.md").read_text()
    )
    assert sorted(members.split(", ")) == sorted(fixtures)


# ---- kips.md -------------------------------------------------------------------------------------------------------


def test_each_kip_that_the_package_names_is_in_the_table_once() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "spark_kafka_sink").rglob("*.py"))
    rows = re.findall(r"^\| ([\d, ]+) \|[^|]+\| ([^|]+) \|[^|]*\|$", (DOCS / "kips.md").read_text(), re.MULTILINE)
    listed = [int(number) for numbers, _ in rows for number in numbers.split(", ")]
    assert {int(number) for number in re.findall(r"KIP-(\d+)", sources)} - set(listed) == set()
    assert len(listed) == len(set(listed))
    assert {here for _, here in rows} == {"has", "has not", "partly"}


@pytest.mark.parametrize("setting", re.findall(r"`([a-z]+(?:\.[a-z]+)+)`", (DOCS / "kips.md").read_text()))
def test_each_setting_of_the_kips_is_known(setting: str) -> None:
    assert setting in {*ProducerConfig.keys(), "metrics.port", "transaction.version"}


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
        """key: "schema.registry.basic.auth.user.info"\n value: "me:CANARY"\n""",
        """key: "schema.registry.url"\n value: "https://me:CANARY@registry"\n""",
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
    rows = table_of(RegistrySettings).items()
    of_registry = {key for key, row in rows if row.metadata.get("is_secret") and not key.endswith(".location")}
    known = {f"kafka.{key}" for key in secret} | {f"schema.registry.{key}" for key in of_registry | {"url"}}
    for name in ("spark.redaction.regex", "spark.sql.redaction.string.regex"):
        assert [key for key in known if not re.search(redaction(name), key)] == []


# ---- settings of logins, on each page that has some ----------------------------------------------------------------


def settings_blocks() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each block of producer settings with its page and the first line of it."""
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```properties\n(.*?)```", page.read_text(), re.DOTALL)):
            pairs = dict(line.split("=", 1) for line in block.splitlines())
            if any(key.startswith("kafka.") for key in pairs):
                yield f"{page.name}, block {number}", pairs


BLOCKS = dict(settings_blocks())
EACH_BLOCK = pytest.mark.parametrize("block", BLOCKS.values(), ids=list(BLOCKS))
SERVICES = {"Confluent Cloud", "Amazon MSK", "Azure Event Hubs", "Redpanda", "Aiven"}
PLACEHOLDER = r"(?:<[a-z ]+>|\.\.\.)"


@EACH_BLOCK
def test_block_of_settings_is_accepted(block: dict[str, str]) -> None:
    config = options.SinkConfig.from_options({"kafka.bootstrap.servers": "h1:9092", "topic": "t", **block})
    assert config.producer.security_protocol != "PLAINTEXT"
    exactly_once = {"kafka.bootstrap.servers": "h1:9092", "topic": "t", "delivery.guarantee": "exactly-once", **block}
    assert options.SinkConfig.from_options(exactly_once).is_exactly_once


@EACH_BLOCK
def test_secrets_of_a_block_are_placeholders(block: dict[str, str]) -> None:
    table = table_of(ProducerConfig)
    for key, value in block.items():
        if not table[key.removeprefix("kafka.")].metadata.get("is_secret"):
            continue
        if key == "kafka.sasl.jaas.config":
            for name, secret in re.findall(r'(password|clientSecret|HMAC)="(.*?)"', value):
                inner = secret.rpartition("SharedAccessKey=")[2]
                assert re.fullmatch(PLACEHOLDER, inner, re.IGNORECASE), name
        elif not key.endswith(("location", "token.provider", "endpoint.url")):
            assert re.fullmatch(PLACEHOLDER, value), key


def test_each_managed_service_has_a_block_of_settings() -> None:
    body = (DOCS / "managed-kafka.md").read_text()
    sections = {part.splitlines()[0]: part for part in body.split("\n## ")[1:]}
    assert {name for name, part in sections.items() if "kafka.bootstrap.servers=" in part} == SERVICES


# ---- all pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_readme_links_every_page(page: Path) -> None:
    assert f"(docs/{page.name})" in (ROOT / "README.md").read_text()


if __name__ == "__main__":
    OPTIONS.write_text(with_tables(OPTIONS.read_text()))
    ERRORS.write_text(with_tables(ERRORS.read_text(), {"errors": errors_table}))
    REGISTRY.write_text(with_tables(REGISTRY.read_text(), {"registry settings": registry_table}))
