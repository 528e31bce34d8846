"""The files of a gateway host: what they say, for one, three and sixty pools."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from tests.ports import free_ports
from tests.stubs.certificates import issue
from tests.stubs.gateway import Nginx, available
from tests.unit.gateway.fleet import pool, spec, varied
from vllm_fleet import gateway, paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.planned import Pool
from vllm_fleet.spec.model import ApiKey, Proxy

KEYS = (
    ApiKey(name="team-b", key="sk-bbb", expires="2030-12-31", models=("m",), concurrent=2),
    ApiKey(name="team-a", key="sk-aaa"),
)


def by_path(files: list[ManagedFile]) -> dict[str, ManagedFile]:
    return {file.path: file for file in files}


def test_same_input_same_bytes_in_any_order() -> None:
    pools = [pool("qwen3-8b", [8002]), pool("glm-4.5-air", [8001], aliases=("glm", "air"))]
    addresses = {"gpu-01": "10.0.0.1"}
    first = gateway.files(spec(), pools, addresses, KEYS, monitors=["10.0.0.9", "10.0.0.8"])
    again = gateway.files(
        spec(), pools[::-1], addresses, KEYS[::-1], monitors=["10.0.0.8", "10.0.0.9", "10.0.0.8"]
    )
    assert first == again
    assert [f.path for f in first] == sorted(f.path for f in first)


def test_every_file_carries_the_mark_first() -> None:
    pem = "-----BEGIN X-----\n-----END X-----\n"
    tls = {"certificate": "gw.pem", "key": "gw.key"}
    for file in gateway.files(spec(tls=tls), [pool("m", [8001])], {}, (), tls=(pem, pem)):
        assert paths.MARK in "".join(file.content.splitlines(True)[:2]), file.path


def test_keys_are_never_written() -> None:
    files = gateway.files(spec(), [pool("m", [8001])], {}, KEYS)
    assert not [f.path for f in files if "sk-aaa" in f.content]
    keys = by_path(files)[f"{gateway.ETC}/keys.json"]
    assert (keys.mode, keys.owner, keys.group, keys.secret) == (0o640, "root", "www-data", True)
    data = json.loads(keys.content)
    assert data["required"] is True
    by_name = {k.pop("name"): k for k in data["keys"]}
    assert by_name["team-a"] == {"sha256": hashlib.sha256(b"sk-aaa").hexdigest()}
    assert by_name["team-b"] == {
        "sha256": hashlib.sha256(b"sk-bbb").hexdigest(),
        "expires": 1924992000,
        "expires_text": "2030-12-31",
        "models": ["m"],
        "concurrent": 2,
    }


def test_a_pool_is_an_upstream_with_its_instances() -> None:
    pools = [pool("glm-4.5-air", [8001, 8003], aliases=("glm",))]
    conf = by_path(gateway.files(spec(), pools, {"gpu-02": "10.0.0.2"}, ()))[gateway.CONF].content
    block = conf[conf.index("# glm-4.5-air") :]
    assert block.splitlines()[:5] == [
        "# glm-4.5-air (also glm)",
        "upstream fleet_glm-4.5-air {",
        "    server 127.0.0.1:8001;  # gpu-01/glm-4.5-air-1",
        "    server 10.0.0.2:8003;  # gpu-02/glm-4.5-air-2",
        '    balancer_by_lua_block { require("fleet.proxy").balance() }',
    ]


def test_longest_answer_bounds_reload_and_stop() -> None:
    files = by_path(gateway.files(spec(longest_answer=100, hold_seconds=50), [], {}, ()))
    assert "worker_shutdown_timeout 210s;" in files[gateway.MAIN].content
    assert "TimeoutStopSec=240\n" in files[gateway.DROP_IN].content
    assert "proxy_read_timeout 100s;" in files[gateway.CONF].content


def conf(**settings: object) -> str:
    made = issue()
    tls = (made.pem, made.key_pem())
    return by_path(gateway.files(spec(**settings), [], {}, (), tls=tls))[gateway.CONF].content


HOST_TLS = {"host_certificate": "/etc/ssl/llm/chain.pem", "host_key": "/etc/ssl/private/llm.key"}
ACME = {"email": "ops@example.com", "domains": ("llm.example.com", "chat.example.com")}


@pytest.mark.parametrize(
    ("tls", "certificate", "key"),
    [
        ({"certificate": "a", "key": "b"}, f"{gateway.ETC}/tls.crt", f"{gateway.ETC}/tls.key"),
        (HOST_TLS, HOST_TLS["host_certificate"], HOST_TLS["host_key"]),
        ({"acme": ACME}, gateway.ACME_PEM, gateway.ACME_PEM),
    ],
    ids=["ours", "on the host", "acme"],
)
def test_three_ways_to_a_certificate(tls: dict[str, object], certificate: str, key: str) -> None:
    text = conf(listen=443, tls=tls)
    assert f"ssl_certificate     {certificate};" in text
    assert f"ssl_certificate_key {key};" in text
    assert "listen 443 ssl http2;" in text
    assert ("listen 80;" in text) == ("acme" in tls)


def test_plain_http_has_no_tls_and_no_http2() -> None:
    text = conf()
    assert "listen 80;" in text
    assert not re.search("ssl|http2|acme", text)


def test_a_certificate_on_the_host_is_watched() -> None:
    files = by_path(gateway.files(spec(tls=HOST_TLS), [], {}, ()))
    watched = re.findall(
        r"^PathChanged=(.*)$", files[f"{gateway.UNITS}/vllm-fleet-tls.path"].content, re.M
    )
    assert watched == [*HOST_TLS.values(), "/etc/ssl/llm", "/etc/ssl/private"]
    service = files[f"{gateway.UNITS}/vllm-fleet-tls.service"].content
    check, reload = service.index("nginx -t"), service.index("systemctl reload nginx")
    assert check < reload
    assert not [path for path in files if path.endswith(("tls.crt", "tls.key"))]


def test_what_an_authority_is_asked() -> None:
    settings = spec(tls={"acme": {**ACME, "directory": "https://ca.lan/directory"}}, listen=443)
    words = gateway.acme_command(settings)
    assert words is not None
    assert words[:2] == ("certbot", "certonly")
    pairs = list(pairwise(words))
    for pair in (
        ("--server", "https://ca.lan/directory"),
        ("--email", "ops@example.com"),
        ("--domain", "llm.example.com"),
        ("--domain", "chat.example.com"),
        ("--webroot-path", gateway.ACME_WEBROOT),
        ("--deploy-hook", gateway.ACME_HOOK),
    ):
        assert pair in pairs
    files = by_path(gateway.files(settings, [], {}, ()))
    assert files[gateway.ACME_HOOK].mode == 0o755
    text = files[gateway.CONF].content
    assert "server_name llm.example.com chat.example.com;" in text
    assert f"root {gateway.ACME_WEBROOT};" in text
    assert gateway.acme_command(spec()) is None


def test_renewals_take_the_hosts_proxy() -> None:
    host = spec(tls={"acme": ACME}, listen=443)
    path = f"{gateway.UNITS}/certbot.service.d/vllm-fleet.conf"
    assert path not in by_path(gateway.files(host, [], {}, ()))
    proxied = host.settings.model_copy(update={"proxy": Proxy(https="http://proxy:3128")})
    host = host.model_copy(update={"settings": proxied})
    assert gateway.acme_environment(host) == {"https_proxy": "http://proxy:3128"}
    text = by_path(gateway.files(host, [], {}, ()))[path].content
    assert 'Environment="https_proxy=http://proxy:3128"' in text


def test_the_hook_of_renewals_puts_chain_and_key_into_one_file(tmp_path: Path) -> None:
    """nginx and systemctl are stand-ins here."""
    files = by_path(gateway.files(spec(tls={"acme": ACME}, listen=443), [], {}, ()))
    hook = tmp_path / "hook"
    pem = tmp_path / "acme.pem"
    hook.write_text(files[gateway.ACME_HOOK].content.replace(gateway.ACME_PEM, str(pem)))
    hook.chmod(0o755)
    for name in ("nginx", "systemctl"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/asked\n')
        (tmp_path / name).chmod(0o755)
    made = issue()
    (tmp_path / "fullchain.pem").write_text(made.pem)
    (tmp_path / "privkey.pem").write_text(made.key_pem())
    subprocess.run(
        [str(hook)],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "RENEWED_LINEAGE": str(tmp_path)},
        check=True,
    )
    assert pem.read_text() == made.pem + made.key_pem()
    assert pem.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "asked").read_text() == "nginx -t -q\nsystemctl reload nginx\n"


def test_one_address_has_a_bound_unless_it_is_named() -> None:
    text = conf(connections_per_address=50, connections_unlimited=("10.1.0.0/16", "10.0.0.5"))
    assert "limit_conn fleet_addresses 50;" in text
    block = text[text.index("geo $fleet_unlimited {") :]
    assert block[: block.index("}")].split("\n")[1:4] == [
        "    default 0;",
        "    10.0.0.5/32 1;",
        "    10.1.0.0/16 1;",
    ]
    text = conf(connections_per_address=None, connections_unlimited=("10.0.0.5",))
    assert not re.search("limit_conn|fleet_unlimited", text)


def only_pool(pools: list[Pool], **settings: object) -> dict[str, Any]:
    files = by_path(gateway.files(spec(**settings), pools, {}, ()))
    data = json.loads(files[f"{gateway.ETC}/pools.json"].content)
    (only,) = data["pools"]
    return cast(dict[str, Any], only)


@pytest.mark.parametrize(
    ("given", "expected", "longest"),
    [
        ((4096, 4096), [4096, 4096], 4096),
        ((4096, "32k"), [4096, 32000], 32000),
        (("32K", "1.5K"), [32768, 1536], 32768),
        ((4096, None), [4096, None], None),  # nothing may be refused for its length
        (("auto", -1), [None, None], None),
    ],
)
def test_max_model_len(
    given: tuple[object, object], expected: list[int | None], longest: int | None
) -> None:
    each = [{"max-model-len": value} for value in given]
    found = only_pool([varied(pool("m", [8001, 8002]), *each)])
    assert [i["max_model_len"] for i in found["instances"]] == expected
    assert found["max_model_len"] == longest


@pytest.mark.parametrize(
    ("args", "setting", "limit"),
    [
        ({"max-num-seqs": 64}, None, 80),
        ({"max-num-seqs": 1}, None, 2),
        ({"max-num-seqs": 16, "data-parallel-size": 4}, None, 80),
        ({}, None, 1280),
        ({"max-num-seqs": 64}, 10, 10),
    ],
)
def test_limit_of_an_instance(args: dict[str, Any], setting: int | None, limit: int) -> None:
    found = only_pool([pool("m", [8001], **args)], instance_requests=setting)
    assert [i["limit"] for i in found["instances"]] == [limit]


def test_adapters_of_all_forms() -> None:
    given: list[object] = [
        "sql=/a/sql",
        ["law=/a/law=2", '{"name": "chat", "path": "/a", "base_model_name": "m"}'],
        [{"name": "code", "path": "/a"}],
        {"name": "one", "path": "/a"},
        None,
    ]
    each = [{"lora-modules": value} for value in given]
    found = only_pool([varied(pool("m", [8001, 8002, 8003, 8004, 8005]), *each)])
    assert [i["loras"] for i in found["instances"]] == [
        ["sql"],
        ["chat", "law"],
        ["code"],
        ["one"],
        [],
    ]
    assert found["loras"] == ["chat", "code", "law", "one", "sql"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gateway.files(spec(), [pool("m", [8001])], {"gpu-01": "gpu-01.lan"}, ()),
            "gpu-01: the gateway reaches instances by IP address, and 'gpu-01.lan' is none; "
            "set `address` for gpu-01",
        ),
        (
            lambda: gateway.files(
                spec(), [pool("a", [8001]), pool("b", [8002], aliases=("a",))], {}, ()
            ),
            "gw-01: the name 'a' is served by 'a' and by 'b'; take it from the `aliases` of one",
        ),
        (
            lambda: gateway.files(
                spec(),
                [pool("a", [8001]), pool("b", [8002], **{"lora-modules": ["a=/x"]})],
                {},
                (),
            ),
            "gw-01: the name 'a' is served by 'a' and by 'b'; take it from the LoRA modules of one",
        ),
        (
            lambda: gateway.files(
                spec(), [], {}, [ApiKey(name="x", key="same"), ApiKey(name="y", key="same")]
            ),
            "gw-01: the API key 'y' is also the key of 'x'",
        ),
        (
            lambda: gateway.files(spec(listen=9145), [], {}, ()),
            "gw-01: gateway.listen: 9145 is the port of /status and /metrics; choose another",
        ),
        (
            lambda: gateway.files(spec(), [], {}, (), monitors=["mon-01"]),
            "gw-01: 'mon-01' may read the gateway's /metrics, but is no IP address or network; "
            "set `address` for that host",
        ),
        (
            lambda: gateway.files(spec(tls={"certificate": "a", "key": "b"}), [], {}, ()),
            "gw-01: gateway.tls is set, but certificate and key were not read",
        ),
    ],
)
def test_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 the whole message is compared
        make()  # type: ignore[operator]
    assert str(raised.value) == message


def _sixty() -> list[Pool]:
    return [
        pool(f"model-{n}", [9000 + 4 * n + i for i in range(4)], aliases=(f"m{n}",))
        for n in range(60)
    ]


@pytest.mark.skipif(not available(), reason="needs root, nginx and its Lua module")
@pytest.mark.parametrize(
    "pools",
    [
        [],
        [pool("qwen3-8b", [8001])],
        [pool("Qwen", [8001, 8002]), pool("qwen", [8003]), pool("empty", [])],
        [pool("six", [8001], address="fd00::1")],
        _sixty(),
    ],
    ids=["none", "one", "three", "ipv6", "sixty"],
)
def test_nginx_accepts(pools: list[Pool]) -> None:
    nginx = Nginx(8080, 9145)
    try:
        nginx.put(gateway.files(spec(listen=8080), pools, {}, KEYS, monitors=["10.0.0.0/8"]))
        said = nginx.check()
        assert "warn" not in said
    finally:
        nginx.stop()


@pytest.mark.skipif(not available(), reason="needs root, nginx and its Lua module")
@pytest.mark.parametrize("tls", [HOST_TLS, {"acme": ACME}], ids=["on the host", "acme"])
def test_nginx_accepts_each_way(tmp_path: Path, tls: dict[str, object]) -> None:
    made = issue()
    port, other, status = free_ports(3)
    nginx = Nginx(port, status, tls=True)
    try:
        nginx.put(
            gateway.files(
                spec(listen=port, tls=tls, connections_unlimited=("10.0.0.5", "fd00::/8")),
                [pool("m", [8001])],
                {},
                KEYS,
                status_port=status,
            )
        )
        text = nginx.root / gateway.CONF.lstrip("/")
        moved = text.read_text().replace("listen 80;", f"listen {other};")
        for path in HOST_TLS.values():
            (tmp_path / Path(path).name).write_text(made.pem + made.key_pem())
            moved = moved.replace(path, str(tmp_path / Path(path).name))
        text.write_text(moved)
        (nginx.root / gateway.ACME_PEM.lstrip("/")).write_text(made.pem + made.key_pem())
        assert "warn" not in nginx.check()
    finally:
        nginx.stop()


def test_lua_modules_are_all_put() -> None:
    files = gateway.files(spec(), [], {}, ())
    put = {Path(f.path).stem for f in files if f.path.startswith(gateway.LUA)}
    modules = Path(gateway.__file__).parent / "lua" / "fleet"
    assert put == {p.stem for p in modules.glob("*.lua")} != set()
