"""The test bed's hub, as its clients see it."""

from __future__ import annotations

import hashlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stubs.gateway import wait_for
from tests.testbed import hub
from tests.testbed.hub import Fault

DATA = bytes(range(256)) * 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    repo = tmp_path / "Tiny/one"
    (repo / "sub").mkdir(parents=True)
    (repo / "a.bin").write_bytes(DATA)
    (repo / "sub/b.txt").write_text("b")
    return tmp_path


@pytest.fixture
def endpoint(root: Path) -> Iterator[str]:
    with hub.running(root) as address:
        yield address


def get(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def a_bin(endpoint: str) -> str:
    return f"{endpoint}/api/v1/models/Tiny/one/repo?Revision=master&FilePath=a.bin"


def listing(endpoint: str, revision: str = "master") -> dict[str, dict[str, object]]:
    url = f"{endpoint}/api/v1/models/Tiny/one/repo/files?Revision={revision}&Recursive=True"
    answer = json.loads(get(url)[1])
    assert (answer["Code"], answer["Success"]) == (200, True)
    return {entry["Path"]: entry for entry in answer["Data"]["Files"]}


def test_the_listing_has_sizes_checksums_and_folders(endpoint: str) -> None:
    files = listing(endpoint)
    assert set(files) == {"a.bin", "sub", "sub/b.txt"}
    assert files["a.bin"]["Size"] == len(DATA)
    assert files["a.bin"]["Sha256"] == hashlib.sha256(DATA).hexdigest()
    assert files["sub"]["Type"] == "tree"


def test_files_are_given_whole_and_by_range(endpoint: str, root: Path) -> None:
    assert get(a_bin(endpoint))[:2] == (200, DATA)
    code, body, headers = get(a_bin(endpoint), Range="bytes=100-199")
    assert (code, body) == (206, DATA[100:200])
    assert headers["Content-Range"] == f"bytes 100-199/{len(DATA)}"
    assert get(a_bin(endpoint), Range="bytes=10000-")[1] == DATA[10000:]
    assert get(a_bin(endpoint), Range="bytes=99999-")[0] == 416

    def logged() -> bool:
        lines = [(e["file"], e["range"], e["status"], e["bytes"]) for e in hub.requests(root)]
        return ("a.bin", "bytes=100-199", 206, 100) in lines

    wait_for(logged, 30)  # a line is written once its answer is sent, in any order


def test_revisions_are_directories(endpoint: str, root: Path) -> None:
    (root / "Tiny/one/revisions.json").write_text(json.dumps({"v1": "sub"}))
    assert set(listing(endpoint, "v1")) == {"b.txt"}
    missing = f"{endpoint}/api/v1/models/Tiny/one/repo/files?Revision=master"
    code, body, _ = get(missing)
    assert code == 404
    assert json.loads(body)["Success"] is False


@pytest.mark.parametrize("file", ["no.bin", "../two/x", "../../requests.jsonl"])
def test_what_is_not_there_is_404(endpoint: str, file: str) -> None:
    url = f"{endpoint}/api/v1/models/Tiny/one/repo?Revision=master&FilePath={file}"
    assert get(url)[0] == 404
    assert get(f"{endpoint}/api/v1/models/Tiny/two/repo/files")[0] == 404


def test_faults_are_switched_at_run_time_and_counted(endpoint: str, root: Path) -> None:
    hub.switch(root, Fault("wrong_bytes", "a.bin", bytes=300, times=1))
    wrong = get(a_bin(endpoint))[1]
    assert [at for at, byte in enumerate(wrong) if byte != DATA[at]] == [300]
    assert get(a_bin(endpoint))[1] == DATA
    hub.switch(root, Fault("cut", "a.bin", bytes=1000))
    with pytest.raises(http.client.IncompleteRead) as cut:
        get(a_bin(endpoint))
    assert cut.value.partial == DATA[:1000]
    hub.switch(root, Fault("no_range", "a.bin"))
    assert get(a_bin(endpoint), Range="bytes=5-")[:2] == (200, DATA)
    hub.switch(root, Fault("wrong_size", "a.bin", bytes=7), Fault("no_sha256", "a.bin"))
    assert (listing(endpoint)["a.bin"]["Size"], listing(endpoint)["a.bin"]["Sha256"]) == (
        len(DATA) + 7,
        "",
    )
    hub.switch(root, Fault("error"))
    assert get(a_bin(endpoint))[0] == 500
    hub.switch(root, Fault("dead"))
    with pytest.raises((urllib.error.URLError, http.client.HTTPException, ConnectionError)):
        get(a_bin(endpoint))
    hub.switch(root)
    assert get(a_bin(endpoint))[1] == DATA


def test_faults_can_be_put_over_http(endpoint: str) -> None:
    body = json.dumps([{"kind": "error", "path": "a.bin"}]).encode()
    request = urllib.request.Request(f"{endpoint}/faults", data=body, method="PUT")
    assert urllib.request.urlopen(request).status == 200
    assert get(a_bin(endpoint))[0] == 500
