"""Certificates and keys for tests, as an authority would issue them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Issued:
    """A certificate, its key, and the one that signed it (itself, where there is none)."""

    certificate: x509.Certificate
    key: Key

    @property
    def pem(self) -> str:
        """The certificate alone."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def key_pem(self, passphrase: bytes | None = None) -> str:
        """Its private key."""
        how: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase:
            how = serialization.BestAvailableEncryption(passphrase)
        form = serialization.PrivateFormat.PKCS8
        return self.key.private_bytes(serialization.Encoding.PEM, form, how).decode()


def issue(
    name: str = "llm.example.com",
    *,
    names: Sequence[str] | None = None,
    issuer: Issued | None = None,
    begins: datetime | None = None,
    days: int = 90,
    rsa_bits: int = 0,
) -> Issued:
    """A certificate for ``name`` and ``names``; self-signed without an ``issuer``."""
    key: Key = (
        rsa.generate_private_key(65537, rsa_bits)
        if rsa_bits
        else ec.generate_private_key(ec.SECP256R1())
    )
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    begins = begins or datetime.now(UTC) - timedelta(hours=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=days))
    )
    listed = [name] if names is None else list(names)
    if listed:
        general = x509.SubjectAlternativeName([_general(each) for each in listed])
        builder = builder.add_extension(general, critical=False)
    return Issued(builder.sign(issuer.key if issuer else key, hashes.SHA256()), key)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
