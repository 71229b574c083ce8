"""sasl.jaas.config: what is in it, read as text. No class it names is ever loaded (compare CVE-2023-25194).

The form is that of Java's login configuration, with one entry (org.apache.kafka.common.security.JaasConfig):
`<class of the login module> required name="value" ... ;`. No refusal repeats any of its text: a quote in the wrong
place makes a password look like a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from spark_kafka_sink.common.option_parsers import RefusalError
from spark_kafka_sink.common.secret import Secret

PLAIN: Final = "PlainLoginModule"
SCRAM: Final = "ScramLoginModule"
OAUTHBEARER: Final = "OAuthBearerLoginModule"
KERBEROS: Final = "Krb5LoginModule"
MSK_IAM: Final = "IAMLoginModule"

_OPTIONS: Final[Mapping[str, re.Pattern[str]]] = {
    PLAIN: re.compile("username|password"),
    SCRAM: re.compile("username|password|tokenauth"),
    OAUTHBEARER: re.compile("clientId|clientSecret|scope|extension_[A-Za-z]+"),
    KERBEROS: re.compile("useKeyTab|keyTab|principal|storeKey|useTicketCache|ticketCache|serviceName|doNotPrompt"),
    MSK_IAM: re.compile("awsProfileName|awsRoleArn|awsRoleSessionName|awsRoleExternalId|awsStsRegion"),
}
"""Login module, by the class's own name whatever package it was moved to → the options that mean something here."""

_FLAGS: Final = frozenset({"required", "requisite", "sufficient", "optional"})
_TOKEN: Final = re.compile(
    r"""\s+ | //[^\n]* | /\*.*?\*/
      | "(?P<double>(?:[^"\\\n]|\\.)*)" | '(?P<single>(?:[^'\\\n]|\\.)*)'
      | (?P<sign>[=;]) | (?P<word>[^\s"'=;]+)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\([0-3]?[0-7]{1,2}|.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_FORM: Final = '<login module> required name="value" ... ; is wanted'


@dataclass(frozen=True, slots=True)
class JaasConfig:
    """The one entry: which login module, by its class's own name (`PLAIN`, `SCRAM`, ...), and its options."""

    login_module: str
    options: tuple[tuple[str, Secret], ...]

    def get(self, name: str) -> str | None:
        """The option's text, in the open; None where it is not given."""
        return next((value.reveal() for given, value in self.options if given == name), None)


def parse_jaas_config(value: object) -> JaasConfig:
    """Raises RefusalError, which shows nothing of `value`."""
    if isinstance(value, JaasConfig):
        return value
    tokens = _tokens(value.reveal() if isinstance(value, Secret) else str(value))
    if len(tokens) < 3 or tokens[0].kind != "text" or tokens[-1] != _Token("sign", ";"):
        raise RefusalError(_FORM)
    if tokens[1].text.lower() not in _FLAGS:
        raise RefusalError(f"{_FORM}, where the second word is one of {', '.join(sorted(_FLAGS))}")
    login_module = tokens[0].text.rpartition(".")[2]
    if login_module not in _OPTIONS:
        raise RefusalError(f"no such login module is known here (no class is loaded); there are {', '.join(_OPTIONS)}")
    return JaasConfig(login_module, _options(tokens[2:-1], login_module))


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """`sign` for = and ;, `text` for a word or what stood between quotes."""
    text: str


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise RefusalError('a quotation mark has no partner; one within a value is written \\"')
        at = match.end()
        if match.lastgroup == "sign":
            found.append(_Token("sign", match["sign"]))
        elif match.lastgroup == "word":
            found.append(_Token("text", match["word"]))
        elif match.lastgroup is not None:
            found.append(_Token("text", _ESCAPE.sub(_unescape, match[match.lastgroup])))
    return found


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code, 8)) if code[0] in "01234567" else _ESCAPED.get(code, code)


def _options(tokens: list[_Token], login_module: str) -> tuple[tuple[str, Secret], ...]:
    if any(token == _Token("sign", ";") for token in tokens):
        raise RefusalError("more than one login module is given; a client has one")
    known = _OPTIONS[login_module]
    options: dict[str, Secret] = {}
    for number, at in enumerate(range(0, len(tokens), 3), start=1):
        group = tokens[at : at + 3]
        if [token.kind for token in group] != ["text", "sign", "text"]:
            raise RefusalError(f'option number {number} is not of the form name="value"')
        name, value = group[0].text, group[2].text
        if not known.fullmatch(name):
            choice = known.pattern.replace("|", ", ")
            raise RefusalError(f"option number {number} of {login_module} is none that is known here: {choice}")
        if name in options:
            raise RefusalError(f"{name} is given twice")
        options[name] = Secret(value)
    return tuple(options.items())
