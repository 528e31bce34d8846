"""Results told as tables, sentences, one page and one capacity table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.bench.levels import level
from vllm_fleet.bench import page
from vllm_fleet.bench.generator import GeneratorError, find, run
from vllm_fleet.bench.knee import Target, keeps, knee
from vllm_fleet.bench.load import Load
from vllm_fleet.bench.result import Result, capacity, capacity_table

LEVELS = (level(1, 100), level(4, 380, first=0.6), level(16, 900, first=3.0), level(64, 950))
LOAD = Load("http://gw/v1", "glm", "")


def result(name: str = "gw", cards: str = "4 x A100", targets: tuple[Target, ...] = ()) -> Result:
    return Result(
        name=name,
        cards=cards,
        load=LOAD,
        levels=LEVELS,
        seen=[None] * 4,
        bend=knee(LEVELS),
        kept=keeps(LEVELS, targets) if targets else None,
        targets=targets,
    )


def test_capacity_is_told_by_use_and_cards() -> None:
    rows = capacity(result())
    assert [(row["use"], row["streams"]) for row in rows] == [
        ("chat and code", 4),
        ("documents, retrieval, agents", 64),
        ("batch work at night", 16),
    ]
    both = capacity_table([result().as_json(), result(cards="2 x H200").as_json()])
    assert [row["cards"] for row in both[:2]] == ["2 x H200", "4 x A100"]
    assert page.capacity_row(both[0])[4:] == ("4", "380", "600 ms", "20.0 ms")


def test_a_result_is_json_and_says_whether_it_is_good() -> None:
    good = result(targets=(Target.parse("ttft-p95=1s"),))
    data = json.loads(json.dumps(good.as_json()))
    assert (data["ok"], data["keeps_targets"], data["knee"]["streams"]) == (True, 4, 16)
    assert data["levels"][2]["out_per_second"] == 900
    assert not result(targets=(Target.parse("ttft-p95=1ms"),)).ok


def test_the_page_holds_tables_and_pictures_and_no_markup_of_others(tmp_path: Path) -> None:
    picture = tmp_path / "throughput.png"
    picture.write_bytes(b"\x89PNG")
    text = page.html([result(name="<b>gw</b>")], [picture], [result(cards="2 x H200").as_json()])
    assert "&lt;b&gt;gw" in text
    assert "data:image/png;base64,iVBORw==" in text
    assert "2 x H200" in text
    assert "Knee at 16 streams" in text


def test_configurations_are_told_in_one_table() -> None:
    figures = {
        "weights_gib": 12.5,
        "kv_cache_tokens": 64_000,
        "load_seconds": 30,
        "warm_seconds": 5,
    }
    row = page.compared_row(replace(result("FP8"), figures=figures))
    told = dict(zip(page.COMPARED_HEAD, row, strict=True))
    assert told["configuration"] == "FP8"
    assert (told["most out tok/s"], told["at streams"], told["knee"]) == ("950", "64", "16")
    assert (told["weights GiB"], told["KV cache GiB"], told["KV tokens"]) == (
        "12.50",
        "-",
        "64,000",
    )
    assert told["start s"] == "35"
    text = page.html([result("one"), result("two")], [])
    assert text.index("configuration") < text.index("<h2>one")


@pytest.mark.parametrize("program", ["/does/not/exist", "no-such-program-here"])
def test_without_the_generator_it_says_how_to_get_it(program: str) -> None:
    with pytest.raises(GeneratorError, match=r"requirements-bench\.lock"):
        find(program)


def test_a_generator_that_fails_is_told_with_its_last_words_and_leaves_no_key(
    tmp_path: Path,
) -> None:
    program = tmp_path / "guidellm"
    program.write_text('#!/bin/sh\necho "$3" >"$(dirname "$3")/asked"\nstat -c %a "$3"\nexit 3\n')
    program.chmod(0o755)
    with pytest.raises(GeneratorError, match="exit code 3") as failed:
        run(str(program), LOAD, tmp_path, "sk-secret")
    assert "600" in str(failed.value)  # the mode of the file with the key
    assert (tmp_path / "asked").read_text().strip() == str(tmp_path / "scenario.json")
    assert not (tmp_path / "scenario.json").exists()
    assert not any("sk-secret" in file.read_text() for file in tmp_path.iterdir())
