"""The gateway's certificate where an authority gives it."""

from __future__ import annotations

import shlex
from collections.abc import Generator

from pyinfra import host
from pyinfra.api import operation

from vllm_fleet import gateway, paths
from vllm_fleet.host_plan import HostPlan
from vllm_fleet.operations.remote import Command


@operation()
def stand_in(plan: HostPlan) -> Generator[Command, None, None]:
    """
    Have a certificate that nobody trusts, where there is none yet.

    nginx refuses a configuration that names a missing one, and the authority gives one only once
    nginx answers it.
    """
    if plan.missing_certificate is None:
        host.noop("a certificate was fetched before")
        return
    pem = gateway.ACME_PEM
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 "
        f"-subj '/CN=vllm-fleet stand-in' -keyout {pem}.key -out {pem}.crt 2>/dev/null"
    )
    yield Command(
        f"install -d {gateway.ETC} {gateway.ACME_WEBROOT}; test -s {pem} || "
        f"{{ umask 077; {make} && cat {pem}.crt {pem}.key >{pem}; "
        f"rm -f {pem}.crt {pem}.key; test -s {pem}; }}"
    )


@operation()
def certificate(plan: HostPlan) -> Generator[Command, None, None]:
    """Have certbot fetch the certificate, and renew it from then on."""
    wanted = plan.missing_certificate
    if wanted is None:
        host.noop("the certificate was fetched before")
        return
    exports = "".join(
        f"export {name}={shlex.quote(value)}; " for name, value in wanted.environment.items()
    )
    stamp = f"{paths.STATE}/loaded/{wanted.name}"
    command = shlex.join(wanted.command)
    yield Command(f"{exports}{command} && printf %s {wanted.checksum} > {stamp}")
