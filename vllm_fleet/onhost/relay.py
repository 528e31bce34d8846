"""Passes Alertmanager's webhooks on to robots of DingTalk, Feishu and WeCom.

    relay.py SETTINGS

SETTINGS is JSON: {"port": 9094, "receivers": {NAME: {"kind": "dingtalk" | "feishu" | "wecom",
"url": address of the robot, "secret": what its messages are signed with, or ""}}}. Alertmanager
posts to http://127.0.0.1:PORT/NAME. What a robot refuses is answered with 502 and its own words,
so that Alertmanager tries again and counts it; addresses are never written to the log.

Standard library alone; runs with the system's Python.
"""

import base64
import hashlib
import hmac
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Dict, List, Tuple

SEND_SECONDS = 10
LARGEST_BODY = 4 << 20
MOST_ALERTS = 20  # in one message; the rest is counted
WECOM_BYTES = 4096  # its limit of a message of markdown
OTHER_BYTES = 18000  # DingTalk takes 20000, Feishu 30 KB
COLOURS = {"critical": "red", "warning": "orange", "info": "blue"}

Json = Dict[str, Any]


class Refused(Exception):
    """What a robot answered instead of yes."""


def title_of(webhook: Json) -> str:
    """`[2 firing] InstanceDown air`."""
    alerts = webhook.get("alerts") or []
    firing = sum(1 for a in alerts if a.get("status") == "firing")
    labels = webhook.get("groupLabels") or {}
    names = [str(labels[k]) for k in ("alertname", "pool", "host") if labels.get(k)]
    state = "%d firing" % firing if firing else "%d over" % len(alerts)
    return "[%s] %s" % (state, " ".join(names) or "vLLM fleet")


def lines_of(webhook: Json) -> List[str]:
    """One line for each alert, the worst first, in markdown that all three robots show."""
    order = ["critical", "warning", "info"]

    def rank(alert: Json) -> Tuple[bool, int]:
        severity = (alert.get("labels") or {}).get("severity")
        return (
            alert.get("status") != "firing",
            order.index(severity) if severity in order else len(order),
        )

    alerts = sorted(webhook.get("alerts") or [], key=rank)
    lines = []
    for alert in alerts[:MOST_ALERTS]:
        labels, notes = alert.get("labels") or {}, alert.get("annotations") or {}
        summary = notes.get("summary") or labels.get("alertname") or "?"
        state = labels.get("severity", "?") if alert.get("status") == "firing" else "over"
        line = "**%s** %s" % (state, summary)
        link = str(notes.get("runbook_url") or "")
        if link.startswith(("http://", "https://")):
            line += " [runbook](%s)" % link
        elif link and alert.get("status") == "firing":
            line += " (%s)" % link
        lines.append(line)
    if len(alerts) > MOST_ALERTS:
        lines.append("and %d more" % (len(alerts) - MOST_ALERTS))
    return lines


def fitted(title: str, lines: List[str], limit: int) -> str:
    """The lines below the title, cut at whole lines to so many bytes."""
    text = "**%s**" % title
    for number, line in enumerate(lines):
        rest = "\n\nand %d more" % (len(lines) - number)
        if len((text + "\n\n" + line + rest).encode()) > limit:
            return text + rest
        text += "\n\n" + line
    return text


def message(kind: str, webhook: Json) -> Json:
    """What the robot of this kind is to post."""
    title, lines = title_of(webhook), lines_of(webhook)
    if kind == "wecom":
        return {"msgtype": "markdown", "markdown": {"content": fitted(title, lines, WECOM_BYTES)}}
    text = fitted(title, lines, OTHER_BYTES)
    if kind == "dingtalk":
        return {"msgtype": "markdown", "markdown": {"title": title, "text": text}}
    firing = webhook.get("status") == "firing"
    severity = (webhook.get("commonLabels") or {}).get("severity", "critical")
    colour = COLOURS.get(severity, "red") if firing else "green"
    header = {"title": {"tag": "plain_text", "content": title}, "template": colour}
    elements = [{"tag": "markdown", "content": "\n\n".join(text.split("\n\n")[1:]) or title}]
    return {"msg_type": "interactive", "card": {"header": header, "elements": elements}}


def signed(kind: str, url: str, secret: str, body: Json, now: float) -> Tuple[str, Json]:
    """Address and body with the signature that the robot asks for, where there is a secret."""
    if not secret or kind == "wecom":
        return url, body
    if kind == "dingtalk":
        stamp = str(int(now * 1000))
        digest = hmac.new(
            secret.encode(), ("%s\n%s" % (stamp, secret)).encode(), hashlib.sha256
        ).digest()
        query = urllib.parse.urlencode(
            {"timestamp": stamp, "sign": base64.b64encode(digest).decode()}
        )
        return url + ("&" if "?" in url else "?") + query, body
    stamp = str(int(now))
    digest = hmac.new(("%s\n%s" % (stamp, secret)).encode(), b"", hashlib.sha256).digest()
    return url, {"timestamp": stamp, "sign": base64.b64encode(digest).decode(), **body}


def check(kind: str, answer: bytes) -> None:
    """Raise Refused where a robot says no; it does so with status 200."""
    try:
        said = json.loads(answer)
        code = said.get("code", said.get("StatusCode", 0)) if kind == "feishu" else said["errcode"]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Refused("the answer is no JSON of %s" % kind) from None
    if code != 0:
        text = said.get("errmsg") or said.get("msg") or said.get("StatusMessage") or ""
        raise Refused("%s says %s: %s" % (kind, code, str(text)[:300]))


def send(receiver: Json, webhook: Json) -> None:
    """Post one message. Raises Refused or OSError, whose texts hold no address."""
    kind = receiver["kind"]
    url, body = signed(
        kind, receiver["url"], receiver.get("secret") or "", message(kind, webhook), time.time()
    )
    request = urllib.request.Request(
        url,
        data=json.dumps(body, ensure_ascii=False).encode(),
        headers={"Content-Type": "application/json; charset=utf-8"},
    )
    try:
        with urllib.request.urlopen(request, timeout=SEND_SECONDS) as response:
            answer = response.read(65536)
    except urllib.error.HTTPError as error:
        raise Refused("%s answered %d" % (kind, error.code)) from None
    check(kind, answer)


class Handler(BaseHTTPRequestHandler):
    """POST /NAME with Alertmanager's JSON."""

    receivers: ClassVar[Dict[str, Json]] = {}
    timeout = 30

    def do_POST(self) -> None:
        """Send it on, and answer as the robot did."""
        name = self.path.strip("/")
        receiver = self.receivers.get(name)
        length = int(self.headers.get("Content-Length") or 0)
        if receiver is None or length > LARGEST_BODY:
            self._answer(404 if receiver is None else 413, "no such receiver, or too much")
            return
        try:
            webhook = json.loads(self.rfile.read(length))
            if not isinstance(webhook, dict):
                raise ValueError("no JSON object")
        except ValueError as error:
            self._answer(400, str(error))
            return
        try:
            send(receiver, webhook)
        except (Refused, OSError) as error:
            said = str(error) or type(error).__name__
            print("relay: %s: not sent: %s" % (name, said), file=sys.stderr, flush=True)
            self._answer(502, said)
            return
        self._answer(200, "sent")

    def _answer(self, status: int, text: str) -> None:
        body = (text + "\n").encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: failures are told above."""


def main(arguments: List[str]) -> int:
    """Serve until ended."""
    with open(arguments[0], encoding="utf-8") as file:
        settings = json.load(file)
    Handler.receivers = settings["receivers"]
    server = ThreadingHTTPServer(("127.0.0.1", int(settings["port"])), Handler)
    server.daemon_threads = True
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
