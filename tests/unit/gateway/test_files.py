"""The files of a gateway host: what they say, for one, three and sixty pools."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.stubs.gateway import Nginx, available
from tests.unit.gateway.fleet import pool, spec, varied
from vllm_fleet import gateway, paths
from vllm_fleet.files import ManagedFile
from vllm_fleet.planned import Pool
from vllm_fleet.spec.model import ApiKey

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


def test_lua_modules_are_all_put() -> None:
    files = gateway.files(spec(), [], {}, ())
    put = {Path(f.path).stem for f in files if f.path.startswith(gateway.LUA)}
    modules = Path(gateway.__file__).parent / "lua" / "fleet"
    assert put == {p.stem for p in modules.glob("*.lua")} != set()
