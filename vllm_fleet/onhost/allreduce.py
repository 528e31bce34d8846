"""One rank of the fabric's test: point to point, then all-reduce, with right sums and bandwidth.

Run by the Python of a release, whose torch and NCCL it tries; beyond torch the standard library
only. Each rank is one process; rank and world size are given, or come from torchrun:

    python allreduce.py --rank 0 --world 2 --master 10.0.0.11:29400 --local-rank 0
    torchrun --nproc-per-node 2 allreduce.py --bytes 1073741824

It prints what it begins, ``step {"step": ..., "seconds": ...}``, so that a rank that hangs has
said where, and as its last line ``result`` or ``failed`` and a JSON object. It never outlives
``--seconds``: an alarm of the kernel ends it also while NCCL waits for a peer that is gone.
"""

import argparse
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Sequence

Json = Dict[str, Any]

SMALLEST = 64 * 1024
# Of the largest size, at most, at once.
BUFFERS = 4
# Beside the buffers: CUDA's context and what NCCL takes for its own.
CONTEXT_MIB = 2048
# Values stay whole numbers below 2**24, which float32 holds without rounding: any difference of
# a sum is a wrong one.
PATTERN = 1021


class Wrong(Exception):
    """What the fabric did wrong; the message is for an operator."""


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Options, with torchrun's environment as their defaults."""
    env = os.environ
    master = "%s:%s" % (env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", ""))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rank", type=int, default=int(env.get("RANK", "-1")))
    parser.add_argument("--world", type=int, default=int(env.get("WORLD_SIZE", "0")))
    parser.add_argument("--local-rank", type=int, default=int(env.get("LOCAL_RANK", "0")))
    parser.add_argument("--master", default=master, help="ADDRESS:PORT of rank 0")
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    parser.add_argument("--bytes", type=int, default=256 * 2**20, help="largest message")
    parser.add_argument("--rounds", type=int, default=20, help="of each size")
    parser.add_argument("--seconds", type=int, default=120, help="it is ended after")
    parser.add_argument(
        "--limit-mbyte", type=float, default=0, help="MB a second at most, for cards that serve"
    )
    asked = parser.parse_args(words)
    if asked.world < 2 or not 0 <= asked.rank < asked.world:
        parser.error("--rank and --world: at least two ranks, or run it by torchrun")
    if not re.fullmatch(r".+:\d+", asked.master):
        parser.error("--master: ADDRESS:PORT of rank 0, not %r" % asked.master)
    if asked.bytes < SMALLEST:
        parser.error("--bytes: at least %d" % SMALLEST)
    return asked


def say(word: str, found: Json) -> None:
    """One line for who reads this, at once."""
    sys.stdout.write("%s %s\n" % (word, json.dumps(found, sort_keys=True)))
    sys.stdout.flush()


def sizes(largest: int) -> List[int]:
    """Bytes of the messages to try: a small one, one in between, the largest."""
    middle = max(SMALLEST, min(largest, 16 * 2**20) // 4)
    return sorted({SMALLEST, middle, largest // 4 * 4})


def transports(log: str) -> Dict[str, int]:
    """How many channels each transport carries, by NCCL's own log (NCCL_DEBUG=INFO).

    ``P2P/CUMEM``, ``SHM/direct``, ``NET/Socket``, ``NET/IB``, ``NET/IB/GDRDMA``; NVLS has no
    line a channel, so its number of channels stands for it.
    """
    found: Dict[str, int] = {}
    for path in re.findall(r"\bvia ([A-Z][A-Za-z0-9]*(?:/[\w().-]+)*)", log):
        parts = path.split("/")
        kept = parts[:2]
        if parts[0] == "NET" and any(part.startswith("GDRDMA") for part in parts[2:]):
            kept.append("GDRDMA")
        name = "/".join(kept)
        found[name] = found.get(name, 0) + 1
    nvls = max((int(n) for n in re.findall(r"(\d+) nvls channels", log)), default=0)
    return {**found, "NVLS": nvls} if nvls else found


def told(log: str) -> Json:
    """What NCCL says of itself: version, network, interfaces, devices, warnings."""

    def last(pattern: str) -> str:
        found = re.findall(pattern, log)
        return str(found[-1]).strip() if found else ""

    return {
        "version": last(r"NCCL version (\S+)"),
        "network": last(r"Using network (\S+)"),
        "devices": last(r"NET/(?:IB|Socket) ?: Using (.+)"),
        "bootstrap": last(r"Bootstrap ?: Using (\S+)"),
        "warnings": re.findall(r"NCCL WARN (.+)", log)[:10],
    }


class Rank:
    """One rank and its device."""

    def __init__(self, torch: Any, asked: argparse.Namespace, log: str) -> None:
        self.torch, self.asked, self.log = torch, asked, log
        self.dist = importlib.import_module("torch.distributed")
        cuda = bool(torch.cuda.is_available())
        self.backend = asked.backend
        if self.backend == "auto":
            self.backend = "nccl" if cuda else "gloo"
        if self.backend == "nccl" and not cuda:
            raise Wrong("no card is seen by this torch, and NCCL needs one: nvidia-smi, driver?")
        self.device = torch.device(
            "cuda:%d" % asked.local_rank if self.backend == "nccl" else "cpu"
        )
        self.busy_until = 0.0

    def step(self, name: str) -> None:
        """Say what is begun."""
        say("step", {"rank": self.asked.rank, "step": name})

    def room(self) -> None:
        """Raises Wrong where the card has no room: what serves on it is not to be pushed."""
        if self.backend != "nccl":
            return
        self.torch.cuda.set_device(self.device)
        free = self.torch.cuda.mem_get_info()[0]
        needed = BUFFERS * self.asked.bytes + CONTEXT_MIB * 2**20
        if free < needed:
            raise Wrong(
                "card %d has %d MiB free and this test takes %d: something serves on it"
                % (self.asked.local_rank, free // 2**20, needed // 2**20)
            )

    def meet(self) -> None:
        """All ranks know each other."""
        timedelta = importlib.import_module("datetime").timedelta
        extra = {"device_id": self.device} if self.backend == "nccl" else {}
        self.dist.init_process_group(
            self.backend,
            init_method="tcp://" + self.asked.master,
            rank=self.asked.rank,
            world_size=self.asked.world,
            timeout=timedelta(seconds=self.asked.seconds),
            **extra,
        )

    def filled(self, count: int, rank: int) -> Any:
        """The values that a rank gives."""
        values = self.torch.arange(count, dtype=self.torch.int32, device=self.device)
        return values.remainder_(PATTERN).add_(rank).to(self.torch.float32)

    def seconds_of(self, rounds: int, count: int, once: Callable[[], None]) -> float:
        """Mean seconds of a round."""
        cap = self.asked.limit_mbyte * 1e6
        took = 0.0
        for _ in range(rounds):
            began = time.perf_counter()
            once()
            if self.backend == "nccl":
                self.torch.cuda.synchronize()
            took += time.perf_counter() - began
            if cap:  # every rank waits alike, so none of them waits for long in a call
                time.sleep(max(0.0, count * 4 / cap - (time.perf_counter() - began)))
        return took / rounds

    def ring(self) -> Json:
        """From each rank to the next: bytes as sent, and how fast."""
        rank, world = self.asked.rank, self.asked.world
        count = max(SMALLEST, self.asked.bytes // 4) // 4
        sent, got = self.filled(count, rank), self.torch.zeros(count, device=self.device)

        def once() -> None:
            pair = [
                self.dist.P2POp(self.dist.isend, sent, (rank + 1) % world),
                self.dist.P2POp(self.dist.irecv, got, (rank - 1) % world),
            ]
            for work in self.dist.batch_isend_irecv(pair):
                work.wait()

        once()
        wrong = int((got != self.filled(count, (rank - 1) % world)).sum())
        took = self.seconds_of(max(1, self.asked.rounds // 4), count, once)
        return {
            "bytes": count * 4,
            "seconds": took,
            "gbyte": count * 4 / took / 1e9,
            "wrong": wrong,
        }

    def reduce(self, size: int) -> Json:
        """All-reduce of one size: how many sums are wrong, and bus bandwidth as nccl-tests say."""
        world, count = self.asked.world, size // 4
        expected = self.filled(count, 0).mul_(world).add_(world * (world - 1) // 2)
        summed = self.filled(count, self.asked.rank)
        self.dist.all_reduce(summed)
        wrong = int((summed != expected).sum())
        del expected
        summed.zero_()
        took = self.seconds_of(self.asked.rounds, count, lambda: self.dist.all_reduce(summed))
        algorithm = count * 4 / took / 1e9
        return {
            "bytes": count * 4,
            "seconds": took,
            "algbw_gbyte": algorithm,
            "busbw_gbyte": algorithm * 2 * (world - 1) / world,
            "wrong": wrong,
        }

    def run(self) -> Json:
        """All steps; what was found."""
        self.step("memory")
        self.room()
        self.step("rendezvous")
        began = time.perf_counter()
        self.meet()
        met = time.perf_counter() - began
        self.step("point to point")
        ring = self.ring()
        self.step("all-reduce")
        rows = [self.reduce(size) for size in sizes(self.asked.bytes)]
        self.step("leave")
        self.dist.barrier()
        self.dist.destroy_process_group()
        log = logged(self.log)
        return {
            "rank": self.asked.rank,
            "world": self.asked.world,
            "backend": self.backend,
            "device": self.name(),
            "torch": str(self.torch.__version__),
            "rendezvous_seconds": met,
            "point_to_point": ring,
            "all_reduce": rows,
            "wrong": ring["wrong"] + sum(row["wrong"] for row in rows),
            "busbw_gbyte": max(row["busbw_gbyte"] for row in rows),
            "transports": transports(log),
            "nccl": told(log),
        }

    def name(self) -> str:
        """The card, or the processor."""
        return (
            str(self.torch.cuda.get_device_name(self.device)) if self.backend == "nccl" else "cpu"
        )


def logged(path: str) -> str:
    """NCCL's own log of this process; empty where it wrote none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def main(words: Sequence[str]) -> int:
    """Be one rank; the exit code."""
    asked = arguments(words)
    # The alarm's own action, not a handler: Python runs none while NCCL or gloo wait.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(asked.seconds)
    folder = tempfile.mkdtemp(prefix="vllm-fleet-allreduce-")
    log = os.path.join(folder, "nccl.log")
    # Only here, where it is read: in what serves it fills the journal.
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,P2P,ENV,GRAPH")
    os.environ["NCCL_DEBUG_FILE"] = log
    try:
        say("step", {"rank": asked.rank, "step": "torch"})
        found = Rank(importlib.import_module("torch"), asked, log).run()
    except Exception as error:  # whatever torch raises: the operator reads it
        why = str(error).strip() or type(error).__name__
        say("failed", {"rank": asked.rank, "why": why[:2000], "nccl": told(logged(log))})
        return 1
    finally:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    say("result", found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
