"""What a rank reads in NCCL's log, and which orders it takes; the rank itself is run for real in
tests/integration/test_fabric_faults.py."""

from __future__ import annotations

import pytest

from vllm_fleet.onhost import allreduce

# Lines as NCCL 2.19 to 2.31 write them, names made up.
ETHERNET = """\
n1:70:70 [0] NCCL INFO Bootstrap : Using ens1:10.0.0.1<0>
n1:70:70 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
n1:70:82 [0] NCCL INFO NET/IB : No device found.
n1:70:82 [0] NCCL INFO NET/Socket : Using [0]ens1:10.0.0.1<0>
n1:70:82 [0] NCCL INFO Using network Socket
n1:70:82 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
n1:70:82 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
n1:70:82 [0] NCCL INFO 2 coll channels, 2 collnet channels, 0 nvls channels, 2 p2p channels
"""
INFINIBAND = """\
n1:70:82 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ens1:10.0.0.1<0>
n1:70:82 [0] NCCL INFO Using network IB
n1:70:82 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/0(8)/GDRDMA
n1:70:82 [0] NCCL INFO Channel 01/0 : 7[7] -> 8[0] [send] via NET/IB/1
n1:70:82 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n1:70:82 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:70:82 [0] NCCL INFO Channel 02 : 0[0] -> 1[1] via SHM/direct/direct
n1:70:82 [0] NCCL INFO 16 coll channels, 16 collnet channels, 16 nvls channels, 32 p2p channels
n1:70:82 [0] misc/socket.cc:537 NCCL WARN socketStartConnect: Connect to 10.0.0.2 failed
"""


def test_transports_as_nccl_tells_them() -> None:
    assert allreduce.transports(ETHERNET) == {"NET/Socket": 2}
    assert allreduce.transports(INFINIBAND) == {
        "NET/IB/GDRDMA": 1,
        "NET/IB": 1,
        "P2P/CUMEM": 2,
        "SHM/direct": 1,
        "NVLS": 16,
    }
    assert allreduce.transports("") == {}


def test_what_nccl_says_of_itself() -> None:
    assert allreduce.told(ETHERNET) == {
        "version": "2.28.9+cuda13.0",
        "network": "Socket",
        "devices": "[0]ens1:10.0.0.1<0>",
        "bootstrap": "ens1:10.0.0.1<0>",
        "warnings": [],
    }
    found = allreduce.told(INFINIBAND)
    assert found["network"] == "IB"
    assert found["devices"].startswith("[0]mlx5_0:1/IB [1]mlx5_1:1/IB")
    assert found["warnings"] == ["socketStartConnect: Connect to 10.0.0.2 failed"]


def test_sizes_end_with_the_largest() -> None:
    assert allreduce.sizes(256 * 2**20) == [64 * 1024, 4 * 2**20, 256 * 2**20]
    assert allreduce.sizes(64 * 1024) == [64 * 1024]
    assert all(size % 4 == 0 for size in allreduce.sizes(1000003))


def test_torchruns_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    for name, value in {**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    asked = allreduce.arguments([])
    assert (asked.rank, asked.world, asked.local_rank, asked.master) == (1, 2, 1, "127.0.0.1:29500")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rank", "0", "--world", "1", "--master", "a:1"], "at least two ranks"),
        (["--rank", "2", "--world", "2", "--master", "a:1"], "at least two ranks"),
        (["--rank", "0", "--world", "2", "--master", "a"], "ADDRESS:PORT of rank 0"),
        (["--rank", "0", "--world", "2", "--master", "a:1", "--bytes", "4"], "at least 65536"),
    ],
)
def test_wrong_orders(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        allreduce.arguments(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
