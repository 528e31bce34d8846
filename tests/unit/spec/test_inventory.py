"""Inventory files are read as pyinfra reads them, and its traps are complaints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fleet.spec.inventory import read_inventory

# Good inventories, read by pyinfra and by us.
GOOD = {
    "lists": 'gpu = ["a", "b"]\ngateway = ["c"]\n',
    "data": 'gpu = [("a", {"ssh_port": 1, "x": 1}), "b"]\nrack = [("a", {"ssh_port": 2})]\n',
    "group data": 'gpu = (["b", ("a", {"y": 2})], {"_sudo": True})\ngateway = ["a"]\n',
    "all in its own order": 'gpu = ["a", "b"]\nall = ["b", ("a", {"z": 3}), "c"]\n',
    "file group declared": 'gpu = ["a", "b"]\nprod = ["b"]\nlate = ["a"]\n',
    "local": 'gpu = ["@local"]\ngateway = ["@local"]\nmonitoring = ["@local"]\n',
    "private names, functions, dicts": (
        "import os\nfrom pathlib import Path\n_PORTS = (1, 2)\n_OPTS = ['-o']\n"
        "def hosts(n):\n    return [f'gpu-{i}' for i in range(n)]\n"
        "settings = {'a': 1}\nCOUNT = 3\ngpu = hosts(COUNT)\n"
    ),
    "empty group": 'gpu = ["a"]\ngateway = []\n',
    "environment and JSON": (
        "import json, os\nfrom pathlib import Path\n"
        "_file = Path(__file__).with_name('hosts.json')\n"
        "_hosts = json.loads(_file.read_text())\n"
        "gpu = [(h['name'], h['data']) for h in _hosts]\n"
        "gateway = [os.environ.get('NO_SUCH_NAME', 'gw')]\n"
    ),
    "host named twice": 'gpu = ["a", "a", "b"]\n',
}

BY_PYINFRA = """
import json, sys
from pyinfra.api import State
from pyinfra.context import ctx_state
from pyinfra_cli.inventory import make_inventory
ctx_state.set(State())
for path in sys.argv[1:]:
    inventory = make_inventory(path)
    print(json.dumps([
        [h.name, [g for g in h.groups if g[0] != "@"], inventory.host_data[h.name]]
        for h in inventory
    ]))
"""


def write_good(tmp_path: Path) -> dict[str, Path]:
    paths = {}
    for number, (name, source) in enumerate(GOOD.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        hosts = [{"name": f"gpu-{n}", "data": {"ssh_port": 2200 + n}} for n in range(3)]
        (folder / "hosts.json").write_text(json.dumps(hosts))
        paths[name] = folder / "prod.py"
        paths[name].write_text(source)
    return paths


def test_same_hosts_groups_and_data_as_pyinfra(tmp_path: Path) -> None:
    paths = write_good(tmp_path)
    command = [sys.executable, "-c", BY_PYINFRA, *map(str, paths.values())]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    for (name, path), line in zip(paths.items(), answer.stdout.splitlines(), strict=True):
        found = read_inventory(str(path), "inventory/prod.py")
        assert found.complaints == [], name
        ours = {h.name: (sorted(h.groups), h.data) for h in found.hosts.values()}
        theirs = {host: (sorted(set(groups)), data) for host, groups, data in json.loads(line)}
        assert ours == theirs, name
        assert list(ours) == list(theirs), f"{name}: declared order"


TRAPS = [
    (
        "PORTS = (8000, 8001)\n",
        "1:1: PORTS: pyinfra takes every list and tuple of an inventory for a group of hosts; "
        "rename the constant _PORTS, or write a group in small letters",
    ),
    (
        'OPTS = ["-o", "BatchMode=yes"]\n',
        "1:1: OPTS: pyinfra takes every list and tuple of an inventory for a group of hosts; "
        "rename the constant _OPTS, or write a group in small letters",
    ),
    (
        'if True:\n    opts = ["-o"]\n',
        '2:5: opts: "-o" cannot be a host; pyinfra takes every list for a group of hosts: '
        "rename it _opts if it is none",
    ),
    (
        'gpu = ("a", "b")\n',
        "1:1: gpu: must be a list of hosts, or (list, data): pyinfra reads a tuple as hosts and "
        "their data; write [...], or rename it _gpu if it is no group",
    ),
    (
        "sizes = ()\n",
        "1:1: sizes: must be a list of hosts, or (list, data): pyinfra reads a tuple as hosts and "
        "their data; write [...], or rename it _sizes if it is no group",
    ),
    (
        "ports = [8000]\n",
        '1:1: ports: a host must be "name" or ("name", {data}), not of type int',
    ),
    (
        'gpu = [("a", "b", {})]\n',
        '1:1: gpu: a host must be "name" or ("name", {data}), not of type tuple',
    ),
    ('gpu = {"a", "b"}\n', "1:1: gpu: must be a list of hosts, or (list, data), not of type set"),
    (
        'gpu = ["@vagrant/x"]\n',
        '1:1: gpu: "@vagrant/x" stands for hosts that only a program knows; name the hosts',
    ),
    (
        'gpu = ["a", "b"]\nall = ["a"]\n',
        '1:13: gpu: has "b", which `all` has not: pyinfra would leave it out',
    ),
    (
        'gpus = ["a"]\n',
        '1:1: gpus: deploy.py knows no group of this name; did you mean "gpu"?',
    ),
    ("_x = 1\n", "1:1: names no host"),
    ("x = (\n", "1:5: not Python: '(' was never closed"),
    ("\nimport no_such_module\n", "2:1: stopped with ModuleNotFoundError: No module named "),
    (
        "def _f():\n    return 1 / 0\n\n_f()\ngpu = ['a']\n",
        "2:1: stopped with ZeroDivisionError: division by zero",
    ),
    ("raise SystemExit('no JSON')\n", "1:1: no JSON"),
]


@pytest.mark.parametrize(("source", "wanted"), TRAPS)
def test_trap(tmp_path: Path, source: str, wanted: str) -> None:
    path = tmp_path / "prod.py"
    path.write_text(source)
    (complaint,) = read_inventory(str(path), "inventory/prod.py").complaints
    assert str(complaint).startswith(f"inventory/prod.py:{wanted}")


def test_missing_file(tmp_path: Path) -> None:
    (complaint,) = read_inventory(str(tmp_path / "x.py"), "inventory/x.py").complaints
    assert str(complaint) == "inventory/x.py: cannot be read: No such file or directory"


def test_output_of_an_inventory_is_kept_off_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prod.py"
    path.write_text('print("hello")\ngpu = ["a"]\n')
    read_inventory(str(path), "inventory/prod.py")
    assert capsys.readouterr() == ("", "hello\n")


def test_environment_decides_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "demo.py"
    path.write_text('import os\ngpu = os.environ["HOSTS"].split()\n')
    monkeypatch.setenv("HOSTS", "x y z")
    assert list(read_inventory(str(path), "inventory/demo.py").hosts) == ["x", "y", "z"]
