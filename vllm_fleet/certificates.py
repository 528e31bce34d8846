"""A gateway's certificate and key, judged before any host is touched. Pure: PEM texts in."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

SHORTEST_RSA = 2048  # OpenSSL of Debian and Ubuntu refuses less, and nginx with it
SOON = timedelta(days=14)
_PUBLIC = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class Problem:
    """What is wrong with one of the two files, why, and what to do."""

    where: Literal["certificate", "key"]
    text: str


def problems(
    chain: bytes, key: bytes, names: Sequence[str] = (), now: datetime | None = None
) -> list[Problem]:
    """Everything for which nginx or a client would refuse this pair.

    ``names`` are those that clients use. Texts hold dates and names, never the key.
    """
    found: list[Problem] = []
    certificates: list[x509.Certificate] = []
    try:
        certificates = x509.load_pem_x509_certificates(chain)
    except ValueError:
        what = "holds a key" if b"PRIVATE KEY" in chain else "holds no PEM certificate"
        text = f"{what}; it must be the chain as PEM text, the server's certificate first"
        found.append(Problem("certificate", text))
    own = None
    try:
        loaded = serialization.load_pem_private_key(key, None)
        own = loaded.public_key().public_bytes(*_PUBLIC)
        if isinstance(loaded, rsa.RSAPrivateKey) and loaded.key_size < SHORTEST_RSA:
            text = f"has {loaded.key_size} bits, and nginx takes {SHORTEST_RSA} or more; "
            found.append(Problem("key", text + "have a new pair issued"))
    except TypeError:
        text = "is locked by a passphrase, which nginx cannot ask for; write it out without one: "
        found.append(Problem("key", text + "openssl pkey -in KEY -out NEW"))
    except (ValueError, UnsupportedAlgorithm):
        what = "holds a certificate" if b"BEGIN CERTIFICATE" in key else "holds no PEM private key"
        found.append(Problem("key", f"{what}; it must be the certificate's private key"))
    if certificates:
        found += _chain(certificates, names, now or datetime.now(UTC))
        if own is not None:
            found += _pair(certificates, own)
    return found


def expiring(chain: bytes, now: datetime | None = None) -> str | None:
    """A warning where a sound chain ends within two weeks."""
    now = now or datetime.now(UTC)
    for one in x509.load_pem_x509_certificates(chain):
        left = one.not_valid_after_utc - now
        if timedelta(0) < left < SOON:
            return (
                f"{_name(one)} ends on {_date(one.not_valid_after_utc)}, in {left.days} days; "
                "have it renewed and deploy"
            )
    return None


def _chain(
    certificates: Sequence[x509.Certificate], names: Sequence[str], now: datetime
) -> Iterator[Problem]:
    for one in certificates:
        if one.not_valid_after_utc <= now:
            text = f"{_name(one)} ended on {_date(one.not_valid_after_utc)}; have it renewed"
            yield Problem("certificate", text)
        elif one.not_valid_before_utc > now:
            text = (
                f"{_name(one)} begins on {_date(one.not_valid_before_utc)}, and this machine has "
                f"{_date(now)}; set the clock, or wait"
            )
            yield Problem("certificate", text)
    covered = _names(certificates[0])
    for name in names:
        if not any(_covers(pattern, name) for pattern in covered):
            listed = ", ".join(covered) or "no name"
            text = f'is for {listed}, not for "{name}"; have one issued that holds it, or '
            yield Problem("certificate", text + "take it from gateway.tls.names")
    for one, issuer in pairwise(certificates):
        if one.issuer != issuer.subject:
            text = (
                f"{_name(one)} is not signed by the one after it, {_name(issuer)}; put the "
                "server's certificate first, then each one's issuer"
            )
            yield Problem("certificate", text)
            return


def _pair(certificates: Sequence[x509.Certificate], own: bytes) -> Iterator[Problem]:
    """The key is that of the first certificate, which nginx shows as its own."""
    matching = [one.public_key().public_bytes(*_PUBLIC) == own for one in certificates]
    if matching[0]:
        return
    if any(matching):
        text = "the server's certificate is not the first in it; put it there, issuers after it"
        yield Problem("certificate", text)
    else:
        text = f"is not the key of {_name(certificates[0])}; give the one that it was issued for"
        yield Problem("key", text)


def _names(certificate: x509.Certificate) -> list[str]:
    """What clients compare with the name they used; the common name counts for nothing now."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    ]


def _covers(pattern: str, name: str) -> bool:
    pattern, name = pattern.lower(), name.lower()
    if pattern == name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        # A star stands for one label.
        return pattern.startswith("*.") and pattern[2:] == name.partition(".")[2]
    return False


def _name(certificate: x509.Certificate) -> str:
    common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    names = _names(certificate)
    shown = common[0].value if common else names[0] if names else "without a name"
    return f"the certificate {str(shown)!r}"


def _date(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d")
