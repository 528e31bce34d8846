"""Who is told of what: settings, the real Alertmanager's inhibition, and the robots' converter."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.ports import free_port
from tests.unit.monitoring.test_files import host
from vllm_fleet import alertmanager, alerts
from vllm_fleet.onhost import relay
from vllm_fleet.spec.receivers import RELAY_PORT, ROBOTS

pytestmark = pytest.mark.slow

needs_alertmanager = pytest.mark.skipif(
    not shutil.which("prometheus-alertmanager"), reason="prometheus-alertmanager is not installed"
)

RECEIVERS: dict[str, Any] = {
    "hook": {"kind": "webhook", "url_file": "secrets/hook"},
    "ops": {"kind": "mail", "to": ("ops@example.org",), "severities": ("critical",)},
    "ding": {"kind": "dingtalk", "url_file": "secrets/ding", "secret_file": "secrets/ding.key"},
    "fei": {"kind": "feishu", "url_file": "secrets/fei", "secret_file": "secrets/fei.key"},
    "wecom": {"kind": "wecom", "url_file": "secrets/wecom"},
}
MAIL = {"server": "mail.example.org:587", "sender": "gpu@example.org", "user": "gpu",
        "password_file": "secrets/mail"}  # fmt: skip
SECRETS = {
    "secrets/hook": "http://127.0.0.1:1/hook?token=s1\n",
    "secrets/ding": "https://oapi.example.org/robot/send?access_token=s2",
    "secrets/ding.key": "SECding",
    "secrets/fei": "https://open.example.org/hook/s3",
    "secrets/fei.key": "feikey",
    "secrets/wecom": "https://qyapi.example.org/send?key=s4",
    "secrets/mail": "s5",
}


def files(**alerting: Any) -> dict[str, Any]:
    spec = host(alerting=alerting)
    return {f.path: f for f in alertmanager.files(spec, SECRETS)}


def test_no_receiver_no_alertmanager() -> None:
    assert files() == {}


def test_secrets_are_in_files_that_not_everybody_reads() -> None:
    for file in files(receivers=RECEIVERS, mail=MAIL).values():
        for secret in ("s1", "s2", "s3", "s4", "s5", "SECding", "feikey"):
            if (
                f"={secret}" in file.content
                or f'"{secret}' in file.content
                or (secret in ("s5",) and f": {secret}\n" in file.content)
            ):
                assert file.secret, file.path
                assert file.mode & 0o007 == 0, file.path


def test_it_listens_for_its_own_host_alone() -> None:
    found = files(receivers=RECEIVERS, mail=MAIL, port=9999)
    assert "--web.listen-address=127.0.0.1:9999" in found[alertmanager.DROPIN].content
    assert "--cluster.listen-address= " in found[alertmanager.DROPIN].content.replace("\n", " ")


@pytest.mark.parametrize(
    ("receiver", "said"),
    [
        ({"kind": "webhook"}, "needs `url_file`"),
        ({"kind": "wecom", "url_file": "secrets/wecom", "secret_file": "secrets/fei.key"},
         "signs nothing"),
        ({"kind": "mail"}, "needs `to`"),
        ({"kind": "mail", "to": ("a@b",)}, "needs `monitoring.alerting.mail`"),
        ({"kind": "dingtalk", "url_file": "secrets/ding", "to": ("a@b",)}, "has no `to`"),
    ],
)  # fmt: skip
def test_a_receiver_that_cannot_work_is_refused(receiver: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"mon-01: monitoring\.alerting\.receivers\.x: ") as error:
        files(receivers={"x": receiver})
    assert said in str(error.value)


def test_every_name_that_holds_back_or_is_held_back_is_an_alert() -> None:
    known = {a.name for a in alerts.alerts()}
    for cause, explained, shared in alertmanager.INHIBITIONS:
        assert cause in known
        assert set(explained) <= known | {".+"}
        assert shared


def test_only_the_packages_own_configuration_is_replaced() -> None:
    packaged = "receivers:\n- name: 'team-X-mails'\n- name: 'team-DB-pager'\n"
    assert not alertmanager.own_settings(None)
    assert not alertmanager.own_settings(packaged)
    assert alertmanager.own_settings("receivers:\n- name: ops\n")
    assert alertmanager.own_settings("receivers: [")


class Listener:
    """A server that remembers what was posted to it, and answers as told."""

    def __init__(self, answer: str = "{}") -> None:
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.answer, self.status = answer, 200
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.posts.append((self.path, json.loads(body)))
                self.send_response(listener.status)
                self.send_header("Content-Length", str(len(listener.answer)))
                self.end_headers()
                self.wfile.write(listener.answer.encode())

            def log_message(self, *_args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener()
    yield one
    one.server.shutdown()


@needs_alertmanager
def test_amtool_accepts_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "alertmanager.yml"
    config.write_text(files(receivers=RECEIVERS, mail=MAIL)[alertmanager.CONFIG].content)
    run = subprocess.run(
        ["amtool", "check-config", str(config)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 receivers" in run.stdout


def alert(name: str, severity: str, **labels: str) -> dict[str, Any]:
    return {
        "labels": {"alertname": name, "severity": severity, **labels},
        "annotations": {"summary": name},
    }


@needs_alertmanager
def test_a_dead_host_is_one_message_and_a_planned_change_none(
    tmp_path: Path, listener: Listener
) -> None:
    """The real Alertmanager, with our configuration; only its waits are made shorter."""
    SECRETS_HERE = {**SECRETS, "secrets/hook": f"http://127.0.0.1:{listener.port}/hook"}
    spec = host(alerting={"receivers": {"hook": RECEIVERS["hook"]}})
    config = alertmanager.files(spec, SECRETS_HERE)[0].content
    shorter = config.replace("group_wait: 15s", "group_wait: 1s")
    assert shorter != config
    with running(tmp_path, shorter) as port:
        sent = [
            alert("HostDown", "critical", host="gpu-01", instance="node"),
            alert("InstanceNotReady", "critical", host="gpu-01", instance="air-a", pool="air"),
            alert("GatewayDown", "critical", host="gpu-01", instance="gateway"),
            # Of another host: it is told.
            alert("InstanceDown", "critical", host="gpu-02", instance="air-a", pool="air"),
            alert("PlannedChange", "none", pool="qwen"),
            alert("PoolDown", "critical", pool="qwen", gateway="gw-01"),
            alert("RequestsHeld", "warning", pool="qwen", gateway="gw-01"),
            # A failed start is no part of a plan.
            alert("InstanceFailed", "critical", host="gpu-03", instance="q", pool="qwen"),
            alert("MixedVersions", "info", pool="air"),  # not asked for by this receiver
        ]
        hand_over(port, sent)
        end = time.monotonic() + 60
        expected = {
            ("HostDown", "gpu-01"),
            ("InstanceDown", "gpu-02"),
            ("InstanceFailed", "gpu-03"),
        }
        told: set[tuple[str, str]] = set()
        while time.monotonic() < end and not expected <= told:
            time.sleep(0.2)
            told = {
                (a["labels"]["alertname"], a["labels"].get("host", ""))
                for _, body in listener.posts
                for a in body["alerts"]
            }
        time.sleep(3)  # whatever else would have come has had its time
        told |= {
            (a["labels"]["alertname"], a["labels"].get("host", ""))
            for _, body in listener.posts
            for a in body["alerts"]
        }
        assert told == expected


class MailServer:
    """As much SMTP as Alertmanager speaks; keeps what it was given, from sender to text."""

    def __init__(self) -> None:
        self.mails: list[tuple[str, list[str], str]] = []
        mails = self.mails

        class Session(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(b"220 test\r\n")
                sender, to = "", []
                while line := self.rfile.readline().decode().strip():
                    verb = line.upper()
                    if verb == "DATA":
                        self.wfile.write(b"354 go on\r\n")
                        text = b"".join(iter(self.rfile.readline, b".\r\n"))
                        mails.append((sender, to, text.decode()))
                    elif verb.startswith("MAIL FROM:"):
                        sender = line.partition("<")[2].partition(">")[0]
                    elif verb.startswith("RCPT TO:"):
                        to = [*to, line.partition("<")[2].partition(">")[0]]
                    self.wfile.write(b"221 bye\r\n" if verb == "QUIT" else b"250 ok\r\n")

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@contextmanager
def running(tmp_path: Path, config: str) -> Iterator[int]:
    """Port of the real Alertmanager with this configuration."""
    (tmp_path / "alertmanager.yml").write_text(config)
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus-alertmanager",
                f"--config.file={tmp_path}/alertmanager.yml",
                f"--storage.path={tmp_path}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--cluster.listen-address=",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(20)


def hand_over(port: int, sent: list[dict[str, Any]]) -> None:
    """Alerts as Prometheus sends them, as soon as Alertmanager takes them."""
    end = time.monotonic() + 60
    while post(port, "/api/v2/alerts", sent) != 200:
        assert time.monotonic() < end
        time.sleep(0.2)


@needs_alertmanager
def test_every_kind_of_receiver_gets_one_message_of_a_dead_host(
    tmp_path: Path, listener: Listener
) -> None:
    """Alertmanager, the converter and their files as a deploy puts them; addresses are local."""
    mail = MailServer()
    robot = f"http://127.0.0.1:{listener.port}"
    secrets = {
        **SECRETS,
        **{f"secrets/{n}": f"{robot}/{n}?access_token=t" for n in ("hook", "ding", "fei", "wecom")},
    }
    server = {"server": f"127.0.0.1:{mail.port}", "sender": "gpu@example.org", "tls": False}
    spec = host(alerting={"receivers": RECEIVERS, "mail": server})
    put = {f.path: f.content for f in alertmanager.files(spec, secrets)}
    relay_port = free_port()
    order = {**json.loads(put[alertmanager.RELAY_SETTINGS]), "port": relay_port}
    (tmp_path / "relay.json").write_text(json.dumps(order))
    config = put[alertmanager.CONFIG].replace("group_wait: 15s", "group_wait: 1s")
    config = config.replace(f"127.0.0.1:{RELAY_PORT}/", f"127.0.0.1:{relay_port}/")
    listener.answer = '{"errcode":0,"code":0}'
    converter = subprocess.Popen(
        [sys.executable, "-I", relay.__file__, str(tmp_path / "relay.json")]
    )
    try:
        with running(tmp_path, config) as port:
            hand_over(
                port,
                [
                    alert("HostDown", "critical", host="gpu-01", instance="node"),
                    alert("InstanceDown", "critical", host="gpu-01", instance="air-a", pool="air"),
                    alert("ProbeFails", "warning", host="gpu-01", instance="air-a", pool="air"),
                ],
            )
            end = time.monotonic() + 60
            paths: list[str] = []
            while time.monotonic() < end and (len(set(paths)) < 4 or not mail.mails):
                time.sleep(0.2)
                paths = [path.partition("?")[0] for path, _ in listener.posts]
            time.sleep(3)  # what would be too much had its time
    finally:
        converter.terminate()
        converter.wait(20)
        mail.server.shutdown()
    bodies = {path.partition("?")[0]: body for path, body in listener.posts}
    assert sorted(path.partition("?")[0] for path, _ in listener.posts) == sorted(bodies)
    assert bodies.keys() == {"/hook", "/ding", "/fei", "/wecom"}
    for body in bodies.values():
        text = json.dumps(body)
        assert "HostDown" in text
        assert "InstanceDown" not in text
        assert "ProbeFails" not in text
    assert bodies["/fei"]["sign"]
    assert any("timestamp=" in path and "sign=" in path for path, _ in listener.posts)
    ((sender, to, text),) = mail.mails
    assert (sender, to) == ("gpu@example.org", ["ops@example.org"])
    assert "HostDown" in text


WEBHOOK: dict[str, Any] = {
    "status": "firing",
    "groupLabels": {"alertname": "InstanceDown", "pool": "air", "host": "gpu-01"},
    "commonLabels": {"severity": "warning"},
    "alerts": [
        {"status": "resolved", "labels": {"severity": "critical"},
         "annotations": {"summary": "gpu-02: 好了"}},
        {"status": "firing", "labels": {"severity": "warning"},
         "annotations": {"summary": "gpu-01: air-a does not answer",
                         "runbook_url": "https://git.example.org/runbook#instance-down"}},
    ],
}  # fmt: skip


def test_a_message_tells_the_worst_first_and_links_to_the_runbook() -> None:
    text = relay.message("dingtalk", WEBHOOK)["markdown"]["text"]
    lines = text.split("\n\n")
    assert lines[0] == "**[1 firing] InstanceDown air gpu-01**"
    assert lines[1] == (
        "**warning** gpu-01: air-a does not answer "
        "[runbook](https://git.example.org/runbook#instance-down)"
    )
    assert lines[2] == "**over** gpu-02: 好了"


def test_each_robot_gets_its_own_form() -> None:
    assert set(relay.message("dingtalk", WEBHOOK)) == {"msgtype", "markdown"}
    assert "content" in relay.message("wecom", WEBHOOK)["markdown"]
    card = relay.message("feishu", WEBHOOK)["card"]
    assert card["header"]["template"] == "orange"
    assert "air-a does not answer" in card["elements"][0]["content"]
    over = relay.message("feishu", {**WEBHOOK, "status": "resolved"})["card"]
    assert over["header"]["template"] == "green"


def test_a_message_keeps_to_the_robots_limit() -> None:
    many = {**WEBHOOK, "alerts": [
        {"status": "firing", "labels": {"severity": "critical"},
         "annotations": {"summary": f"gpu-{i:02}: " + "显存" * 80}} for i in range(60)
    ]}  # fmt: skip
    content = relay.message("wecom", many)["markdown"]["content"]
    assert len(content.encode()) <= relay.WECOM_BYTES
    assert content.split("\n\n")[-1].startswith("and ")
    assert "and 40 more" in relay.message("dingtalk", many)["markdown"]["text"]


def test_signatures_are_those_that_the_robots_check() -> None:
    url, _ = relay.signed("dingtalk", "https://x/send?access_token=t", "SEC", {}, 1700000000.5)
    query = parse_qs(urlsplit(url).query)
    assert query["access_token"] == ["t"]
    assert query["timestamp"] == ["1700000000500"]
    wanted = hmac.new(b"SEC", b"1700000000500\nSEC", hashlib.sha256).digest()
    assert query["sign"] == [base64.b64encode(wanted).decode()]
    url, body = relay.signed("feishu", "https://x", "key", {"msg_type": "text"}, 1700000000.5)
    assert url == "https://x"
    wanted = hmac.new(b"1700000000\nkey", b"", hashlib.sha256).digest()
    assert body["sign"] == base64.b64encode(wanted).decode()
    assert body["timestamp"] == "1700000000"


@pytest.fixture
def converter(tmp_path: Path, listener: Listener) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The converter as its unit runs it, with a robot of each kind."""
    port = free_port()
    url = f"http://127.0.0.1:{listener.port}/robot?token=hidden"
    settings = {
        "port": port,
        "receivers": {k: {"kind": k, "url": url, "secret": ""} for k in ROBOTS},
    }
    (tmp_path / "settings").write_text(json.dumps(settings))
    process = subprocess.Popen(
        [sys.executable, "-I", relay.__file__, str(tmp_path / "settings")],
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if post(port, "/none", WEBHOOK) == 404:
            break
        time.sleep(0.1)
    yield port, process
    process.terminate()
    process.wait(20)


def post(port: int, path: str, body: Any) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("dingtalk", '{"errcode":0,"errmsg":"ok"}', '{"errcode":310000,"errmsg":"sign not match"}'),
        ("wecom", '{"errcode":0,"errmsg":"ok"}', '{"errcode":93000,"errmsg":"invalid webhook"}'),
        ("feishu", '{"code":0,"msg":"success"}', '{"code":19021,"msg":"sign match fail"}'),
    ],
)
def test_a_robots_no_reaches_alertmanager(
    converter: tuple[int, subprocess.Popen[str]], listener: Listener, kind: str, good: str, bad: str
) -> None:
    port, process = converter
    listener.answer = good
    assert post(port, f"/{kind}", WEBHOOK) == 200
    path, _ = listener.posts[0]
    assert path == "/robot?token=hidden"
    listener.answer = bad  # with status 200
    assert post(port, f"/{kind}", WEBHOOK) == 502
    listener.status = 500
    assert post(port, f"/{kind}", WEBHOOK) == 502
    assert post(port, f"/{kind}", ["no object"]) == 400
    process.terminate()
    assert process.stderr
    said = process.stderr.read()
    assert json.loads(bad).get("errmsg", json.loads(bad).get("msg")) in said
    assert "hidden" not in said
