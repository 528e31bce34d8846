"""A gateway's certificate and key: what nginx or a client would refuse, found beforehand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.stubs.certificates import Issued, issue
from tests.unit.fleets import fleet
from vllm_fleet.certificates import expiring, problems
from vllm_fleet.spec.complaints import SpecError
from vllm_fleet.spec.load import check_inventory, load_fleet

ROOT = issue("Our CA", names=[], days=3650)
SERVER = issue(names=["llm.example.com", "*.api.example.com", "10.0.0.9"], issuer=ROOT)


def said(chain: str, key: str, *names: str, now: datetime | None = None) -> list[str]:
    return [f"{p.where} {p.text}" for p in problems(chain.encode(), key.encode(), names, now)]


@pytest.mark.parametrize(
    "names",
    [(), ("llm.example.com",), ("LLM.Example.com",), ("eu.api.example.com", "10.0.0.9")],
)
def test_a_sound_pair(names: tuple[str, ...]) -> None:
    assert said(SERVER.pem + ROOT.pem, SERVER.key_pem(), *names) == []
    assert said(SERVER.pem, SERVER.key_pem(), *names) == []


@pytest.mark.parametrize(
    "name", ["example.com", "api.example.com", "a.b.api.example.com", "10.0.0.8", "0.0.9"]
)
def test_a_name_that_it_lacks(name: str) -> None:
    (text,) = said(SERVER.pem, SERVER.key_pem(), name)
    assert text == (
        "certificate is for llm.example.com, *.api.example.com, 10.0.0.9, not for "
        f'"{name}"; have one issued that holds it, or take it from gateway.tls.names'
    )


def test_a_common_name_alone_counts_for_nothing() -> None:
    old = issue("llm.example.com", names=[])
    assert "is for no name, not for" in said(old.pem, old.key_pem(), "llm.example.com")[0]


def test_dates() -> None:
    past = issue(begins=datetime(2020, 1, 1, tzinfo=UTC), days=31)
    (text,) = said(past.pem, past.key_pem())
    assert text == (
        "certificate the certificate 'llm.example.com' ended on 2020-02-01; have it renewed"
    )
    (text,) = said(past.pem, past.key_pem(), now=datetime(2019, 1, 1, tzinfo=UTC))
    assert "begins on 2020-01-01, and this machine has 2019-01-01; set the clock" in text
    assert said(past.pem, past.key_pem(), now=datetime(2020, 1, 2, tzinfo=UTC)) == []


def test_an_issuer_that_ended() -> None:
    root = issue("Old CA", names=[], begins=datetime(2020, 1, 1, tzinfo=UTC), days=31)
    server = issue(issuer=root)
    (text,) = said(server.pem + root.pem, server.key_pem())
    assert text.startswith("certificate the certificate 'Old CA' ended on")


def test_ends_soon() -> None:
    pem = issue(days=30).pem.encode()
    assert expiring(pem) is None
    text = expiring(pem, datetime.now(UTC) + timedelta(days=20))
    assert text is not None
    assert ", in 9 days; have it renewed" in text


def test_another_key() -> None:
    (text,) = said(SERVER.pem, ROOT.key_pem())
    assert text == (
        "key is not the key of the certificate 'llm.example.com'; give the one that it was "
        "issued for"
    )


def test_an_order_that_nginx_refuses() -> None:
    first, second = said(ROOT.pem + SERVER.pem, SERVER.key_pem())
    assert "put the server's certificate first, then each one's issuer" in first
    assert "the server's certificate is not the first in it" in second


def test_a_stranger_in_the_chain() -> None:
    (text,) = said(SERVER.pem + issue("Other", names=[]).pem, SERVER.key_pem())
    assert "is not signed by the one after it, the certificate 'Other'" in text


@pytest.mark.parametrize(
    ("chain", "key", "where", "words"),
    [
        ("hello", SERVER.key_pem(), "certificate", "holds no PEM certificate"),
        (SERVER.key_pem(), SERVER.key_pem(), "certificate", "holds a key"),
        (SERVER.pem, SERVER.pem, "key", "holds a certificate"),
        (SERVER.pem, "hello", "key", "holds no PEM private key"),
        (SERVER.pem, SERVER.key_pem(b"geheim"), "key", "locked by a passphrase"),
        (SERVER.pem[:200], SERVER.key_pem(), "certificate", "holds no PEM certificate"),
    ],
)
def test_files_that_are_something_else(chain: str, key: str, where: str, words: str) -> None:
    (text,) = said(chain, key)
    assert text.startswith(f"{where} ")
    assert words in text
    assert "PRIVATE" not in text


def test_a_short_key() -> None:
    short = issue(rsa_bits=1024)
    assert "key has 1024 bits, and nginx takes 2048 or more" in said(short.pem, short.key_pem())[0]
    good = issue(rsa_bits=2048)
    assert said(good.pem, good.key_pem()) == []


# As settings


def checked(root: Path, gateway: str, pair: Issued | None = SERVER) -> list[str]:
    """Complaints about `gateway.yml` with this text, without their place."""
    if not (root / "inventory").exists():
        fleet(root)
    (root / "secrets").mkdir(exist_ok=True)
    if pair is not None:
        (root / "secrets/gw.pem").write_text(pair.pem)
        (root / "secrets/gw.key").write_text(pair.key_pem())
    (root / "group_vars/gateway.yml").write_text(gateway)
    found = check_inventory(str(root / "inventory/prod.py"))
    return [str(c).partition("group_vars/gateway.yml:")[2] for c in found.complaints]


def test_a_bad_pair_is_told_with_its_place_before_any_host_is_touched(tmp_path: Path) -> None:
    tls = "gateway:\n  tls:\n    certificate: secrets/gw.pem\n    key: secrets/gw.key\n"
    assert checked(tmp_path, tls) == []
    (text,) = checked(tmp_path, tls + "    names: [chat.example.com]\n")
    assert text.startswith('3:18: gateway.tls.certificate: "secrets/gw.pem": is for llm')
    (tmp_path / "secrets/gw.key").write_text(ROOT.key_pem())
    (text,) = checked(tmp_path, tls, None)
    assert text.startswith('4:10: gateway.tls.key: "secrets/gw.key": is not the key of')
    with pytest.raises(SpecError, match="is not the key of"):
        load_fleet(str(tmp_path / "inventory/prod.py"))


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        ("{}", "gateway.tls: names no certificate; give one of: certificate and key, "),
        ("{certificate: secrets/gw.pem}", "gateway.tls.certificate: needs key beside it"),
        ("{key: secrets/gw.key}", "gateway.tls.key: needs certificate beside it"),
        ("{host_key: /etc/a.key}", "gateway.tls.host_key: needs host_certificate beside it"),
        (
            "{host_key: /a, host_certificate: /b, acme: {email: a@b.c, domains: [x.y]}}",
            "has host_certificate and host_key as well as acme; give one of",
        ),
        (
            "{acme: {email: a@b.c, domains: ['*.example.com']}}",
            "domains[0]: a star is proved by DNS alone",
        ),
        ("{acme: {email: a@b.c, domains: []}}", "gateway.tls.acme.domains: must not be empty"),
        ("{acme: {email: a@b.c, domains: ['a b']}}", "must be a DNS name"),
        (
            "{acme: {email: a@b.c, domains: [x.y], directory: 'http://ca/'}}",
            "must be an address that begins with https://",
        ),
        ("{host_certificate: '/a b;', host_key: /c}", "must be an absolute path of letters"),
    ],
)
def test_one_way_and_whole(tmp_path: Path, tls: str, words: str) -> None:
    (text,) = checked(tmp_path, f"gateway: {{listen: 443, tls: {tls}}}\n")
    assert words in text


def test_the_authority_needs_port_80(tmp_path: Path) -> None:
    tls = "tls: {acme: {email: a@b.c, domains: [x.y]}}"
    (text,) = checked(tmp_path, f"gateway: {{{tls}}}\n")
    assert "gateway.tls.acme: the authority looks at port 80, which clients have" in text
    assert checked(tmp_path, f"gateway: {{listen: 443, {tls}}}\n") == []


@pytest.mark.parametrize("value", ["10.0.0.5/33", "gw.lan", "10.0.0"])
def test_networks_are_addresses(tmp_path: Path, value: str) -> None:
    (text,) = checked(tmp_path, f'gateway: {{connections_unlimited: ["{value}"]}}\n')
    assert "gateway.connections_unlimited[0]: must be an IP address or a network" in text
