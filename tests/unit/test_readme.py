"""README, its Chinese twin and the guides: what they show exists and works."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.stubs.certificates import issue
from vllm_fleet import gateway, monitoring, paths
from vllm_fleet.cli import main
from vllm_fleet.cli.init import OWN, SHARED
from vllm_fleet.gateway import keepalived
from vllm_fleet.spec.load import check_inventory

ROOT = Path(__file__).resolve().parents[2]
README, CHINESE = "README.md", "README.zh-CN.md"
OPERATIONS, DECISIONS, CHANGELOG = "docs/operations.md", "docs/decisions.md", "CHANGELOG.md"
PAGES = (README, CHINESE, OPERATIONS, DECISIONS, CHANGELOG)
# Of the operator's or the host's system; the first words of what a page may show besides ours.
SYSTEM = {"cd", "curl", "git", "grep", "journalctl", "nano", "nginx", "python3", "ssh", "systemctl"}
SYSTEM |= {"systemd-analyze", "promtool", "torchrun"}
# Places of ours on a host; what else begins with "/" is the path of an address.
ON_HOST = (
    *(paths.OPT, paths.ETC, paths.RUN, paths.STATE),
    *(gateway.ETC, gateway.CONF, gateway.ACCESS_LOG, keepalived.CONF),
    *(monitoring.CONFIG, monitoring.FOLDER, "/etc/systemd/system/vllm@"),
)
URL_PATHS = ("/v1/", "/status", "/metrics", "/drain", "/undrain", "/health")
URL_PATHS += ("/fleet/ready", "/invocations", "/pools/")


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language, without their fences."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)


def inline(page: str) -> list[str]:
    """What stands between single backticks outside of code blocks."""
    rest = re.sub(r"^```.*?^```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", rest)


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text(page))


def pictures(page: str) -> list[str]:
    return re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text(page))


def commands(page: str) -> list[list[str]]:
    """Words of every command shown: in blocks of shell, and inline where one begins like ours."""
    lines = [
        line
        for block in blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]
    lines += [i for i in inline(page) if re.match(r"(make|fleet|systemctl|journalctl) ", i)]
    lines += [i for i in inline(page) if re.match(r"\S*pyinfra .*\.py", i)]
    return [
        shlex.split(part) for line in lines for part in re.split(r" && | \| ", line) if part.strip()
    ]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))


def without_comments(block: str) -> str:
    return re.sub(r"[ \t]*#.*", "", block)


def shape(page: str) -> dict[str, object]:
    """What two pages that say the same have in common, whatever their language."""
    body = re.sub(r"^```.*?^```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    return {
        "headings": re.findall(r"^(#+) ", body, re.MULTILINE),
        "commands": commands(page),
        "pictures": pictures(page),
        "links": [link for link in links(page) if not link.startswith("README")],
        "blocks": [without_comments(b) for b in blocks(page, "[a-z]+")],
        "table rows": len(re.findall(r"^\|", body, re.MULTILINE)),
        "list items": re.findall(r"^(-|\d\.) ", body, re.MULTILINE),
        "names": sorted(inline(page)),
        "paragraphs": len(re.split(r"\n\n+", body)),
    }


def test_both_languages_have_the_same_parts() -> None:
    english, chinese = shape(README), shape(CHINESE)
    for part, value in english.items():
        assert chinese[part] == value, part


def test_the_two_commands_stand_first() -> None:
    for page in (README, CHINESE):
        assert blocks(page, "sh")[0].splitlines() == ["make demo", "make test"]
    deployment = blocks(README, "sh")[1].splitlines()
    assert len(deployment) <= 10
    assert deployment[-1] == "pyinfra inventory/prod.py deploy.py"


def problem_of(words: list[str]) -> str | None:
    """Why a shown command does not exist; None where it does."""
    program = words[0].rpartition("/")[2]
    if program == "make":
        missing = set(words[1:]) - targets()
        return f"make has no {missing}" if missing else None
    if program == "fleet":
        if words[1].endswith(":"):
            return None
        found = main.get_command(click.Context(main), words[1])
        return None if found else f"fleet has no {words[1]}"
    if program == "pyinfra":
        files = [w for w in words[1:] if w.endswith(".py")]
        return next((f"no {f}" for f in files if not (ROOT / f).is_file()), None)
    if program == "pip":
        named = [w for w in words[1:] if w.startswith("vllm-fleet/")]
        gone = [w for w in named if not (ROOT / w.partition("/")[2]).is_file()]
        return f"no {gone}" if gone else None
    return None if program in SYSTEM or words[0] == "." else f"{program} is unknown"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(page: str) -> None:
    shown = commands(page)
    assert [(words, why) for words in shown if (why := problem_of(words))] == []
    if page in (README, OPERATIONS):
        assert {"fleet", "pyinfra"} <= {words[0] for words in shown}


def test_a_command_that_does_not_exist_is_found() -> None:
    for line in ("make dmo", "fleet chek x", "pyinfra inventory/x.py deploy.py", "frobnicate"):
        assert problem_of(line.split()), line


def repository_paths(page: str) -> Iterator[Path]:
    """Files that a page names: links from where it stands, names from the repository's root."""
    for link in links(page):
        if not re.match(r"https?://|#", link):
            yield (ROOT / page).parent / link.partition("#")[0]
    for name in inline(page):
        top = name.partition("/")[0]
        in_repository = top in {"docs", "tests", "vllm_fleet", "inventory", "group_vars"}
        if in_repository and re.fullmatch(r"[A-Za-z0-9_./-]+", name):
            yield ROOT / name


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page: str) -> None:
    assert [str(path) for path in repository_paths(page) if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_place_on_a_host_is_one_of_ours(page: str) -> None:
    named = [name for name in inline(page) if re.fullmatch(r"/[\w@./-]+", name)]
    ours = [n for n in named if n.startswith(ON_HOST)]
    assert sorted(set(named) - set(ours) - {n for n in named if n.startswith(URL_PATHS)}) == []
    assert ours or page in (CHANGELOG,)


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page: str) -> None:
    sources = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    named = {name for name in inline(page) if re.fullmatch(r"test_\w+", name)}
    assert {name for name in named if f"def {name}(" not in sources} == set()
    assert named or page != DECISIONS


def shown_files(page: str) -> list[dict[str, str]]:
    """The files that a page shows, by name; a file that is shown again begins another set."""
    sets: list[dict[str, str]] = [{}]
    for block in blocks(page, "(?:yaml|python)"):
        name = re.match(r"# ((?:group_vars|secrets|inventory)/\S+)\n", block)
        assert name, f"{page}: the first line of a block names its file:\n{block}"
        if name[1] in sets[-1]:
            sets.append({})
        sets[-1][name[1]] = block
    return sets


@pytest.mark.parametrize("page", [README, CHINESE, OPERATIONS])
def test_every_shown_setting_is_taken(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_SUDO", "secret")
    sets = shown_files(page)
    assert any("group_vars/prod.yml" in files for files in sets)
    for number, files in enumerate(sets):
        root = tmp_path / str(number)
        assert CliRunner().invoke(main, ["init", str(root)]).exit_code == 0
        (root / "secrets").mkdir()
        made = issue()
        for name, text in (
            ("keys.yml", '- {name: app, key: "k"}\n'),
            ("gateway.pem", made.pem),
            ("gateway.key", made.key_pem()),
            ("vrrp.password", "x\n"),
            ("dingtalk.url", "https://robot.example.org/send?access_token=x\n"),
            ("dingtalk.secret", "x\n"),
        ):
            (root / "secrets" / name).write_text(text)
        example = (root / "group_vars/prod.yml").read_text()
        for name, content in files.items():
            if page == OPERATIONS and name.startswith("inventory/"):
                rest = re.sub(r"^_REACH = .*$", "", (root / name).read_text(), flags=re.MULTILINE)
                content += rest
            elif page == OPERATIONS and name == "group_vars/prod.yml":
                # A part: the example has the rest, without the keys that are shown.
                for key in re.findall(r"^(\w+):", content, re.MULTILINE):
                    example = re.sub(rf"^{key}:.*\n((?: .*)?\n)*", "", example, flags=re.MULTILINE)
                content += example
            (root / name).write_text(content, encoding="utf-8")
        result = check_inventory(str(root / "inventory/prod.py"))
        assert [str(c) for c in result.complaints] == [], files
        assert result.fleet is not None


def test_a_wrong_setting_would_be_found(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["init", str(tmp_path / "f")]).exit_code == 0
    shown = shown_files(README)[0]["group_vars/prod.yml"].replace("port: 8001", "prot: 8001")
    (tmp_path / "f/group_vars/prod.yml").write_text(shown)
    assert check_inventory(str(tmp_path / "f/inventory/prod.py")).complaints


def test_what_init_writes_is_what_the_pages_name() -> None:
    written = {*OWN, *SHARED}
    for page in (README, OPERATIONS):
        for files in shown_files(page):
            assert {n for n in files if not n.startswith("secrets/")} <= written


def test_alerts_that_are_named_exist() -> None:
    named = set(re.findall(r"alerts? ([a-z]+-[a-z-]+)", text(DECISIONS)))
    assert named
    runbook = text("docs/runbook.md")
    assert {name for name in named if f"### {name}\n" not in runbook} == set()


@pytest.mark.parametrize("name", ["layout", "demo"])
def test_pictures_are_whole_and_ask_no_other_server(name: str) -> None:
    path = ROOT / f"docs/pictures/{name}.svg"
    assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert re.findall(r"url\(\s*['\"]?http|@import|href=|<image", path.read_text()) == []


def test_the_demos_picture_is_drawn_from_its_text() -> None:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "docs/pictures/demo.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kept = text("docs/pictures/demo.txt")
    assert module.cleaned(kept) == kept
    assert module.drawn(kept) == text("docs/pictures/demo.svg")
    said = f"Bearer demo-{'0f' * 16} http://x\n  /some/where/.testbed    the bed\ufffd\n"
    assert module.cleaned(said) == "Bearer demo-KEY http://x\n  .testbed    the bed\n"


def test_the_demos_text_has_what_the_demo_prints() -> None:
    printed = (ROOT / "tests/testbed/demo.py").read_text()
    kept = text("docs/pictures/demo.txt")
    titles = re.findall(r'_title\(f?"([^"{:]+)', printed)
    assert len(titles) >= 4
    assert [title for title in titles if title not in kept] == []


def test_the_inventory_shown_is_one_that_pyinfra_reads(tmp_path: Path) -> None:
    file = tmp_path / "inventory/prod.py"
    file.parent.mkdir()
    file.write_text(shown_files(README)[0]["inventory/prod.py"])
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", str(file), "debug-inventory"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gpu-02" in done.stdout + done.stderr
