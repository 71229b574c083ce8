"""sasl.jaas.config is read as text like in Java, and no refusal repeats its contents."""

from __future__ import annotations

import pickle

import pytest

from spark_kafka_sink.common.options import RefusalError
from spark_kafka_sink.common.security import PLAIN_MODULE, parse_jaas_config
from spark_kafka_sink.common.texts import Secret

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


@pytest.mark.parametrize(
    ("text", "username", "password"),
    [
        (f'{PLAIN} required username="alice" password="pw";', "alice", "pw"),
        (f"{PLAIN} required username='alice' password='p\"w';", "alice", 'p"w'),
        (f"  {PLAIN}\n  REQUIRED\n  username=alice\n  password = pw ;\n", "alice", "pw"),
        (f'{PLAIN} required username="a\\"b" password="c\\\\d\\n\\101";', 'a"b', "c\\d\nA"),
        (f'/* who */ {PLAIN} required // and how\n username="alice" password="a;b=c //d";', "alice", "a;b=c //d"),
        (f'{PLAIN} required username="$ConnectionString" password="Endpoint=sb://x/;Key=k=";', None, None),
        ('kafkashaded.org.apache.kafka.x.PlainLoginModule required username="a" password="ü";', "a", "ü"),
        ('PlainLoginModule optional username="" password="";', "", ""),
        ('PlainLoginModule requisite username="a" password="b";', "a", "b"),
        ('PlainLoginModule sufficient username="a" password="b";', "a", "b"),
        (r"PlainLoginModule required username=a\n password=b\101;", r"a\n", r"b\101"),
    ],
)
def test_jaas_config_in_javas_forms_is_read(text: str, username: str | None, password: str | None) -> None:
    entry = parse_jaas_config(text)
    assert entry.login_module == PLAIN_MODULE
    assert entry.get("username") == ("$ConnectionString" if username is None else username)
    assert entry.get("password") == ("Endpoint=sb://x/;Key=k=" if password is None else password)
    assert entry.get("tokenauth") is None
    assert parse_jaas_config(entry) is entry
    assert parse_jaas_config(Secret(text)) == entry


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hunter2", "login module"),
        ("", "login module"),
        (f'{PLAIN} required username="a" password="hunter2"', "login module"),
        (f'{PLAIN} hunter2 username="a";', "second word is one of optional, required"),
        ('org.hunter2.JndiLoginModule required user.provider.url="ldap://hunter2";', "no Java class is loaded"),
        (f'{PLAIN} required username="a" password="hunter2;', "quotation mark without a partner"),
        (f'{PLAIN} required username="a" password=hun"ter2;', "quotation mark without a partner"),
        (f'{PLAIN} required username="a" password=hun ter2;', "number 3, that is not of the form"),
        (f'{PLAIN} required username="a" password="x"hunter2="y";', "known are username, password"),
        (f'{PLAIN} required username="a" username="hunter2";', "has username twice"),
        (f'{PLAIN} required username="a"; {PLAIN} required password="hunter2";', "only one login module"),
        (f'{PLAIN} required = "hunter2" x;', "not of the form"),
        (f'{PLAIN} required "a\nhunter2"="b";', "quotation mark"),
    ],
)
def test_jaas_config_that_java_refuses_or_without_meaning_is_refused(text: str, expected: str) -> None:
    with pytest.raises(RefusalError, match=expected) as refusal:
        parse_jaas_config(text)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("module", "option"),
    [
        ("scram.ScramLoginModule", 'tokenauth="true"'),
        ("oauthbearer.OAuthBearerLoginModule", 'extension_logicalCluster="lkc-1"'),
        ("com.sun.security.auth.module.Krb5LoginModule", 'keyTab="/etc/k.keytab"'),
        ("software.amazon.msk.auth.iam.IAMLoginModule", 'awsProfileName="p"'),
    ],
)
def test_each_login_module_has_its_options(module: str, option: str) -> None:
    entry = parse_jaas_config(f"{module} required {option};")
    name, _, value = option.partition("=")
    assert entry.get(name) == value.strip('"')


def test_jaas_entry_shows_no_option_and_can_be_pickled() -> None:
    entry = parse_jaas_config(f'{PLAIN} required username="alice" password="hunter2";')
    assert "hunter2" not in repr(entry)
    assert pickle.loads(pickle.dumps(entry)) == entry
    assert hash(entry) != hash(parse_jaas_config(f'{PLAIN} required username="alice" password="other";'))
