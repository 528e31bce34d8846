"""`fleet bench` against the engine's own figures: the same requests, counted on both sides.

    python benchmarks/bench_against_engine.py URL --model M [--tokenizer DIR] [--generator P]
                                              [--words]

URL is one vLLM that nobody else asks. For each level: the generator's means beside the engine's
_sum/_count over the same window, and the tokens that each of them counted. Bounds: means within
5 %, tokens equal. The last line is one JSON object.

--words: answers of words alone, chosen from DIR's vocabulary. A model with random weights else
says pieces of letters, which are tokens to the engine and no text yet to a client: the first text
comes a token late, the last a token early.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from vllm_fleet.bench.generator import find  # noqa: E402
from vllm_fleet.bench.load import Length, Load  # noqa: E402
from vllm_fleet.bench.measure import measure  # noqa: E402

BOUND = 0.05
MEANS = {"first_token": "TTFT", "between_tokens": "ITL", "whole": "answer"}
WORD = re.compile("[A-Za-z]{2,}")
MOST_WORDS = 500  # vLLM takes a list of them with every request


def words(tokenizer: str) -> list[int]:
    """Tokens that are text by themselves."""
    vocabulary = json.loads((Path(tokenizer) / "tokenizer.json").read_text())["model"]["vocab"]
    return [number for text, number in vocabulary.items() if WORD.fullmatch(text)][:MOST_WORDS]


def main() -> int:
    """Measure, print a table and the JSON line; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--generator")
    parser.add_argument("--streams", default="1,4", help="levels")
    parser.add_argument("--input", default="512")
    parser.add_argument("--output", default="64")
    parser.add_argument("--words", action="store_true", help="answers of words alone")
    parser.add_argument("--out", help="keep the generator's report here")
    args = parser.parse_args()
    if args.words and not args.tokenizer:
        parser.error("--words needs --tokenizer DIR: the words are chosen from its vocabulary")
    load = Load(
        args.url,
        args.model,
        args.tokenizer,
        tuple(int(number) for number in args.streams.split(",")),
        Length.parse(args.input),
        Length.parse(args.output),
        seconds=600,
        extras={"allowed_token_ids": words(args.tokenizer)} if args.words else {},
    )
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            find(args.generator),
            load,
            Path(args.out or folder),
            name="engine",
            metrics=f"{load.target}/metrics",
        )
    good, rows = True, []
    print(f"{'streams':>8} {'':<9}{'bench':>12}{'engine':>12}{'apart':>9}")
    for level, seen in zip(found.levels, found.seen, strict=True):
        if seen is None:
            sys.exit("the engine's metrics could not be read: " + "; ".join(found.notes))
        row: dict[str, object] = {"streams": level.streams}
        for what, word in MEANS.items():
            ours, theirs = getattr(level, what).mean, seen.means[what]
            apart = ours / theirs - 1
            good &= abs(apart) <= BOUND
            row[what] = {"bench": ours, "engine": theirs, "apart": round(apart, 4)}
            print(
                f"{level.streams:>8} {word:<9}{ours * 1e3:>9.2f} ms{theirs * 1e3:>9.2f} ms"
                f"{apart:>+9.1%}"
            )
        for word, ours, theirs in (
            ("in", level.tokens_in, seen.tokens_in),
            ("out", level.tokens_out, seen.tokens_out),
        ):
            good &= ours == theirs
            row[f"tokens_{word}"] = {"bench": ours, "engine": theirs}
            print(f"{level.streams:>8} tok {word:<5}{ours:>12}{theirs:>12.0f}")
        row["out_per_second"] = level.out_per_second
        rows.append(row)
    print(json.dumps({"levels": rows, "met": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
