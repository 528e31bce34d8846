"""Weights from each other: one download from the hub for a whole fleet of hosts.

Every host serves what it has verified, file by file and in ModelScope's own addresses, to the
hosts of this download alone, and only while it lasts. Who gets which file from the hub follows
from the listing and the hosts, the same on all of them, without a coordinator; everything else
comes from whoever has it. A host that dies or gives wrong bytes is replaced: by another one that
has the file, else by the next in the file's own order, which asks the hub.

What came is checked in weights.py like everything else. Part of weights.py; no program.
"""

import contextlib
import http.client
import http.server
import json
import random
import re
import socketserver
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

if __package__:
    from vllm_fleet.onhost import hub, tools
else:  # on a host: a flat directory of scripts
    import hub  # type: ignore[import-not-found,no-redef]

    import tools  # type: ignore[no-redef]

say = tools.say
Entry = hub.Entry

PORT = 8997
POLL_SECONDS = 0.5
ANSWER_SECONDS = 5
# A host that has not answered for so long is not waited for; also at the start, where pyinfra
# begins on all hosts at about the same time.
PATIENCE_SECONDS = 20
SMALL = 1 << 20  # such files come from the hub at once: waiting would take longer
FILES_AT_ONCE = 8
FROM_HUB_AT_ONCE = 6  # files, over all hosts
UPLOADS_AT_ONCE = 3  # of one host: the first to have a file pass it on, too
MOST_WAITING = 256  # files that are waited for at once
WORKING, DONE, FAILED = "working", "done", "failed"


class Share:
    """What this host has verified of one model, served to the other hosts of this download."""

    def __init__(self, settings: Mapping[str, Any], places: Iterable[Path]) -> None:
        fanout = settings["fanout"]
        self.repo = str(settings["repo"])
        self.revision = str(settings["revision"])
        self.me = str(fanout["me"])
        self.port = int(fanout.get("port") or PORT)
        self.allow = {str(peer) for peer in fanout["peers"]}
        self.places = list(places)  # while it is put together, and where it is switched in
        self.lock = threading.Lock()
        self.state = WORKING
        self.have: Dict[str, Entry] = {}
        self.sent = 0
        self.uploads = threading.Semaphore(UPLOADS_AT_ONCE)
        self.server: Optional[_Server] = None

    def __enter__(self) -> "Share":
        try:
            self.server = _Server((self.me, self.port), self)
        except OSError as error:
            say(f"{self.repo}: cannot share with other hosts at {self.me}:{self.port} ({error})")
            return self
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def add(self, entries: Iterable[Entry]) -> None:
        """Serve these files from now on."""
        with self.lock:
            self.have.update({entry.path: entry for entry in entries})

    def about(self) -> Dict[str, Any]:
        """What other hosts are told."""
        with self.lock:
            return {
                "repo": self.repo,
                "revision": self.revision,
                "state": self.state,
                "have": {path: e.sha256 or e.git for path, e in self.have.items()},
            }

    def find(self, path: str) -> Optional[Path]:
        """A verified file; None for every other path."""
        with self.lock:
            if path not in self.have:
                return None
        return next((p / path for p in self.places if (p / path).is_file()), None)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"
    timeout = 60

    def do_GET(self) -> None:
        share = self.server.share
        url = urllib.parse.urlsplit(self.path)
        query = {key: values[0] for key, values in urllib.parse.parse_qs(url.query).items()}
        path = urllib.parse.unquote(url.path)
        repo = f"/api/v1/models/{share.repo}/repo"
        if self.client_address[0] not in share.allow:
            self.close_connection = True
            self._json(403, {"Code": 403, "Success": False, "Message": "not of this fleet"})
        elif path == "/fleet/peer":
            self._json(200, share.about())
        elif query.get("Revision") != share.revision:
            self._json(404, {"Code": 404, "Success": False, "Message": "another revision"})
        elif path == f"{repo}/files":
            with share.lock:
                files = [
                    {"Path": e.path, "Name": e.path.rpartition("/")[2], "Type": "blob",
                     "Size": e.size, "Sha256": e.sha256}
                    for e in share.have.values()
                ]  # fmt: skip
            self._json(200, {"Code": 200, "Success": True, "Data": {"Files": files}})
        elif path == repo and share.find(query.get("FilePath", "")):
            if not share.uploads.acquire(blocking=False):
                self._json(503, {"Code": 503, "Success": False, "Message": "serves others"})
                return
            try:
                self._file(share, query["FilePath"])
            finally:
                share.uploads.release()
        else:
            self._json(404, {"Code": 404, "Success": False, "Message": "not here (yet)"})

    def _file(self, share: Share, name: str) -> None:
        found = share.find(name)
        if found is None:  # removed between two looks
            return self._json(404, {"Code": 404, "Success": False, "Message": "not here"})
        with found.open("rb") as file:
            size = found.stat().st_size
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            start = int(match[1]) if match else 0
            end = min(size, int(match[2]) + 1) if match and match[2] else size
            if start > size or end < start:
                return self._json(416, {"Code": 416, "Success": False, "Message": "out of range"})
            self.send_response(206 if match else 200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(end - start))
            if match:
                self.send_header("Content-Range", f"bytes {start}-{max(start, end - 1)}/{size}")
            self.end_headers()
            # The kernel moves the bytes; a fleet's network is faster than a loop here.
            self.wfile.flush()
            try:
                share.sent += (
                    self.connection.sendfile(file, start, end - start) if end > start else 0
                )
            except OSError:
                self.close_connection = True
        return None

    def _json(self, status: int, value: Mapping[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what is asked here is no news."""


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: Tuple[str, int], share: Share) -> None:
        super().__init__(address, _Handler)
        self.share = share

    def server_bind(self) -> None:
        """Without the look-up of its own name, which takes long without a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of ours."""


class Busy(ConnectionError):
    """A host that serves as many others as it does at once."""


class Peer:
    """Another host of this download, as it answered last."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.seen = 0.0
        self.state = ""
        self.have: Dict[str, str] = {}
        self.loading = 0
        self.failed = 0.0  # when a file from it failed
        self.liar = False  # gave wrong bytes


class Fanout:
    """A source of files: other hosts where they have them, else the hub.

    ``fetchers``: the hosts that lack files, in one order on all of them; ``peers``: these and
    those that have everything already.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        origin: Optional["hub.Source"],
        entries: List[Entry],
        share: Share,
    ) -> None:
        fanout = settings["fanout"]
        self.name = str(settings["name"])
        self.origin = origin  # None on a host that lacks nothing
        self.share = share
        self.fetchers = [str(one) for one in fanout["fetchers"]]
        self.patience = float(fanout.get("patience") or PATIENCE_SECONDS)
        self.owners = owners(entries, self.fetchers)
        self.peers = {str(p): Peer(str(p)) for p in fanout["peers"] if str(p) != share.me}
        self.began = time.monotonic()
        # Few files at once from the hub, over all hosts: one that is whole early is passed on
        # while the next one comes; all at once, they end all at once, and the lines between the
        # hosts stand idle until then.
        self.sequence = self._sequence(entries)
        at_once = int(settings.get("files_at_once") or FILES_AT_ONCE)
        self.hub_slots = threading.Semaphore(max(1, at_once // max(1, len(self.fetchers))))
        self.peer_slots = threading.Semaphore(at_once)
        self.lock = threading.Lock()
        self.last: Dict[str, str] = {}  # who gave a file
        self.from_hub = self.from_peers = 0
        self.ended = threading.Event()
        for peer in self.peers.values():
            threading.Thread(target=self._watch, args=(peer,), daemon=True).start()

    # -- as a source

    def fetch(self, entry: Entry, place: Path) -> None:
        """One file into a directory, from whoever has it first."""
        assert self.origin is not None, "only a host that lacks files fetches"
        while True:
            peer = self._holder(entry)
            if peer is not None:
                try:
                    with self.peer_slots:
                        self._from(self._holder(entry) or peer, entry, place)
                except Busy:
                    time.sleep(POLL_SECONDS / 2)
                except (OSError, http.client.HTTPException) as error:
                    full = hub.disk_refusal(error, entry.path)
                    if full is not None:
                        raise full from error
                    peer.failed = time.monotonic()
                    say(f"{self.name}: {entry.path}: {peer.address} failed ({hub.cause(error)})")
                else:
                    with self.lock:
                        self.last[entry.path] = peer.address
                        self.from_peers += entry.size
                    return
            elif entry.size <= SMALL or (self.is_mine(entry) and self._has_turn(entry)):
                with self.lock:
                    self.last.pop(entry.path, None)
                with self.hub_slots:
                    self.origin.fetch(entry, place)
                with self.lock:
                    self.from_hub += entry.size
                return
            else:
                time.sleep(POLL_SECONDS / 2)

    def distrust(self, entry: Entry) -> None:
        """What came was wrong: ask whoever gave it no more."""
        address = self.last.get(entry.path)
        if address in self.peers:
            self.peers[address].liar = True
            say(f"{self.name}: {entry.path}: wrong bytes from {address}, which is asked no more")

    def order(self, entries: Iterable[Entry]) -> List[Entry]:
        """The order in which to take files: own ones, then as they become whole elsewhere.

        Every host asks another one first, so that they do not all ask the same.
        """
        turn: Dict[str, int] = {}
        place: Dict[str, Tuple[int, int]] = {}
        mine = self.fetchers.index(self.share.me)
        for entry in sorted(entries, key=lambda e: (-e.size, e.path)):
            owner = self.owners[entry.path]
            turn[owner] = turn.get(owner, 0) + 1
            place[entry.path] = (
                turn[owner],
                (self.fetchers.index(owner) - mine) % len(self.fetchers),
            )
        return sorted(
            entries, key=lambda e: (self.owners[e.path] != self.share.me, place[e.path], e.path)
        )

    def _sequence(self, entries: Iterable[Entry]) -> List[Entry]:
        """Large files in the order in which the hosts ask the hub for them."""
        turn: Dict[str, int] = {}
        keyed = []
        for entry in sorted(entries, key=lambda e: (-e.size, e.path)):
            owner = self.owners[entry.path]
            turn[owner] = turn.get(owner, 0) + 1
            if entry.size > SMALL:
                keyed.append((turn[owner], self.fetchers.index(owner), entry))
        return [entry for _, _, entry in sorted(keyed, key=lambda one: one[:2])]

    def _has_turn(self, entry: Entry) -> bool:
        """Whether few enough files before this one are still on their way from the hub.

        Those of a host that is dead or gave up do not count: nobody would end the wait.
        """
        waiting = 0
        for other in self.sequence:
            if other.path == entry.path:
                return True
            owner = self.peers.get(self.owners[other.path])
            if owner is None:  # this host's own
                there = other.path in self.share.have
            else:
                there = other.path in owner.have or not self.alive(owner) or owner.state == FAILED
            waiting += not there
            if waiting >= FROM_HUB_AT_ONCE:
                return False
        return True

    # -- who

    def is_mine(self, entry: Entry) -> bool:
        """Whether this host is the one to ask the hub for a file.

        Its owner is, then whoever follows, as long as those before are dead or gave up.
        """
        start = self.fetchers.index(self.owners[entry.path])
        for address in [*self.fetchers[start:], *self.fetchers[:start]]:
            if address == self.share.me:
                return True
            peer = self.peers[address]
            if self.alive(peer) and peer.state != FAILED and not peer.liar:
                return False
        return True

    def alive(self, peer: Peer) -> bool:
        """Whether a host answers, or may still begin to."""
        return time.monotonic() - (peer.seen or self.began) < self.patience

    def _holder(self, entry: Entry) -> Optional[Peer]:
        """The least busy host that has a file; None where none has."""
        now = time.monotonic()
        wanted = entry.sha256 or entry.git
        found = [
            peer
            for peer in self.peers.values()
            if peer.have.get(entry.path) == wanted
            and not peer.liar
            and self.alive(peer)
            and now - peer.failed > 2
        ]
        return min(found, key=lambda peer: (peer.loading, random.random()), default=None)

    def _from(self, peer: Peer, entry: Entry, place: Path) -> None:
        query = urllib.parse.urlencode({"Revision": self.share.revision, "FilePath": entry.path})
        repo = urllib.parse.quote(self.share.repo)
        path = f"/api/v1/models/{repo}/repo?{query}"
        partial = place / f"{entry.path}.incomplete"
        partial.parent.mkdir(parents=True, exist_ok=True)
        with self.lock:
            peer.loading += 1
        try:
            hub.download(
                entry,
                partial,
                lambda headers: self._ask(peer, path, headers, hub.IDLE_SECONDS),
                peer.address,
            )
        finally:
            with self.lock:
                peer.loading -= 1
        partial.replace(place / entry.path)

    def _ask(self, peer: Peer, path: str, headers: Mapping[str, str], seconds: float) -> Any:
        return _asking(self.share.me, peer.address, self.share.port, path, headers, seconds)

    def _watch(self, peer: Peer) -> None:
        """Keep in mind what a host has, until this download ends."""
        while not self.ended.is_set():
            try:
                with self._ask(peer, "/fleet/peer", {}, ANSWER_SECONDS) as answer:
                    about = json.loads(answer.read(hub.LARGEST_PAGE))
                same = (about["repo"], about["revision"]) == (self.share.repo, self.share.revision)
                # A host that is at another model takes no part in this one (yet): were it waited
                # for, two hosts could wait for each other.
                peer.have = dict(about["have"]) if same else {}
                if same:
                    peer.state = str(about["state"])
                    peer.seen = time.monotonic()
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
                if peer.state == DONE:  # it ended, as one does that nobody needs any more
                    peer.have = {}
            self.ended.wait(POLL_SECONDS)

    # -- the end

    def serve_out(self) -> None:
        """Go on serving until no other host needs it: all have it, gave up or are gone."""
        said = False
        while True:
            waiting = sorted(
                p.address
                for address, p in self.peers.items()
                if address in self.fetchers and p.state not in (DONE, FAILED) and self.alive(p)
            )
            if not waiting:
                break
            if not said:
                said = True
                say(f"{self.name}: complete here, serving {', '.join(waiting)}")
            time.sleep(POLL_SECONDS)
        # Those that still look must learn of this host's end from itself, not by a dead port.
        time.sleep(2 * POLL_SECONDS)
        self.ended.set()


def owners(entries: Iterable[Entry], fetchers: List[str]) -> Dict[str, str]:
    """Which host asks the hub for which file: the same everywhere, like bytes for each."""
    load = dict.fromkeys(fetchers, 0)
    found: Dict[str, str] = {}
    for entry in sorted(entries, key=lambda e: (-e.size, e.path)):
        owner = min(fetchers, key=lambda one: (load[one], fetchers.index(one)))
        load[owner] += entry.size
        found[entry.path] = owner
    return found


@contextlib.contextmanager
def _asking(
    me: str, peer: str, port: int, path: str, headers: Mapping[str, str], seconds: float
) -> Iterator[http.client.HTTPResponse]:
    """Ask another host, past every proxy, from the address by which it knows this one."""
    connection = http.client.HTTPConnection(peer, port, timeout=seconds, source_address=(me, 0))
    try:
        connection.request("GET", path, headers={"User-Agent": "vllm-fleet", **headers})
        answer = connection.getresponse()
        answer.unbounded = True  # type: ignore[attr-defined] # hub.limit_mib is for the hub
        if answer.status == 503:
            raise Busy("serves others")
        if answer.status not in (200, 206):
            raise ConnectionError(f"answers {answer.status}")
        yield answer
    finally:
        connection.close()
