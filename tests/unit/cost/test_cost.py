"""An own fleet against an API, by hand."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from vllm_fleet import cost
from vllm_fleet.cli.cost import cost as command

REPO = Path(__file__).resolve().parents[3]
EXAMPLE = (REPO / "docs/cost-example.yml").read_text()
# One host: 36500 over 1 year is 100 a day; people 50 a day; 10 tokens a second out is 0.864
# million a day at full load.
PLAIN = """\
power: 0
hosts: {price: 36500, years: 1, watts_load: 1000, pue: 1}
people: {count: 1, cost: 18250}
capacity: {input_per_second: 0, output_per_second: 10, utilisation: 1}
api: {input: 0, output: 1000}
traffic: {input_share: 0}
"""


def test_break_even_by_hand() -> None:
    prices = cost.parse(PLAIN)
    assert cost.tokens_of_host(prices) == 864_000
    assert cost.day(prices, 1) == pytest.approx(150)
    assert cost.api_price(prices) == pytest.approx(0.001)
    found = cost.break_even(prices)
    assert found is not None
    assert (found.tokens, found.hosts) == (pytest.approx(150_000), 1)
    # The second host costs 100 a day more, and the API 864 by then.
    assert found.always_from == pytest.approx(150_000)


def test_a_further_host_can_make_it_dearer_again() -> None:
    # One host bears 864 000 tokens; the API takes 156 for them; one host
    # costs 150 a day, two 250.
    prices = cost.parse(PLAIN, {"api": {"output": 180}})
    found = cost.break_even(prices)
    assert found is not None
    assert (found.tokens, found.hosts) == (pytest.approx(150 / 180e-6), 1)
    # Three bear 2 592 000 for 350, and are dearer up to 1 944 444; four for 450 never are.
    assert found.always_from == pytest.approx(350 / 180e-6)
    assert cost.day(prices, 900_000) > cost.api_price(prices) * 900_000
    assert cost.day(prices, 1_500_000) < cost.api_price(prices) * 1_500_000


def test_an_api_that_is_always_cheaper() -> None:
    assert cost.break_even(cost.parse(PLAIN, {"api": {"output": 100}})) is None
    assert cost.break_even(cost.parse(PLAIN, {"api": {"output": 0}})) is None


def test_power_follows_the_load_and_spares_cost() -> None:
    prices = cost.parse(PLAIN, {"hosts": {"watts_idle": 200, "pue": 1.5, "spare": 1}})
    prices = prices.model_copy(update={"power": 0.1})
    parts = cost.parts_of_day(prices, 1, 432_000)
    assert parts["hardware"] == pytest.approx(200)
    # Two hosts idle, and half of the difference between load and idle of the one that works.
    assert parts["power"] == pytest.approx((400 + 0.5 * 800) * 1.5 * 24 / 1000 * 0.1)


def test_money_bound_and_worth_left() -> None:
    prices = cost.parse(PLAIN, {"hosts": {"residual": 0.2, "interest": 0.1, "upkeep": 0.05}})
    parts = cost.parts_of_day(prices, 1, 0)
    assert parts["hardware"] == pytest.approx((36500 * 0.8 + 36500 * 0.6 * 0.1) / 365)
    assert parts["upkeep"] == pytest.approx(5)


def test_the_scarcer_of_input_and_output_bounds_the_mixture() -> None:
    prices = cost.parse(
        PLAIN,
        {"capacity": {"input_per_second": 100}, "traffic": {"input_share": 0.5}},
    )
    assert cost.tokens_of_host(prices) == pytest.approx(20 * 86400)
    prices = cost.parse(
        PLAIN,
        {"capacity": {"input_per_second": 5}, "traffic": {"input_share": 0.5}},
    )
    assert cost.tokens_of_host(prices) == pytest.approx(10 * 86400)


def test_cached_input_is_cheaper() -> None:
    api = {"input": 2, "output": 8, "cached": 1, "cached_share": 0.5}
    prices = cost.parse(PLAIN, {"api": api, "traffic": {"input_share": 0.5}})
    assert cost.api_price(prices) * 1e6 == pytest.approx(0.5 * 1.5 + 0.5 * 8)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "mapping"),
        ("a: [", "no YAML"),
        (PLAIN.replace("price: 36500", "prise: 1"), "hosts.price: Field required"),
        (PLAIN.replace("utilisation: 1", "utilisation: 40"), "capacity.utilisation"),
        (PLAIN.replace("input_share: 0", "input_share: 80"), "traffic.input_share"),
    ],
)
def test_wrong_prices_are_refused(text: str, told: str) -> None:
    with pytest.raises(cost.CostError) as refused:
        cost.parse(text)
    assert told in str(refused.value)


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    (tmp_path / "prices.yml").write_text(EXAMPLE)
    done = CliRunner().invoke(command, [str(tmp_path / "prices.yml"), "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data["break_even"]["hosts"] == 1
    today = data["today"]
    assert today["own_a_day"] == pytest.approx(sum(today["parts_a_day"].values()))
    told = CliRunner().invoke(command, [str(tmp_path / "prices.yml")]).output
    assert "break-even" in told
    assert "cheaper       the own fleet" in told


def test_capacity_of_a_measurement_and_load_of_prometheus(tmp_path: Path) -> None:
    answers = {"avg_over_time(sum": 600.0, "avg_over_time((": 800.0, "max_over_time((": 3200.0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            from urllib.parse import parse_qs, urlparse

            (query,) = parse_qs(urlparse(self.path).query)["query"]
            value = next(v for begin, v in answers.items() if query.startswith(begin))
            body = {"data": {"result": [{"value": [0, str(value)]}]}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    levels = [
        {"streams": n, "in_per_second": 100.0 * n, "out_per_second": 10.0 * n} for n in (1, 4)
    ]
    (tmp_path / "result.json").write_text(
        json.dumps({"levels": levels, "keeps_targets": None, "knee": {"streams": 4}})
    )
    (tmp_path / "prices.yml").write_text(EXAMPLE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        more = ["--bench", str(tmp_path / "result.json"), "--instances", "2", "--prometheus", url]
        done = CliRunner().invoke(command, [str(tmp_path / "prices.yml"), "--json", *more])
        server.shutdown()
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data["today"]["tokens_a_day"] == 800 * 86400
    # 80 out and 800 in a second, three quarters of it input, a quarter of the day's peak.
    assert data["tokens_a_day_of_a_host"] == pytest.approx(80 / 0.25 * 86400 * 0.25)


def test_a_prometheus_without_figures_is_told(tmp_path: Path) -> None:
    (tmp_path / "prices.yml").write_text(EXAMPLE)
    more = ["--prometheus", "http://127.0.0.1:1"]
    done = CliRunner().invoke(command, [str(tmp_path / "prices.yml"), *more])
    assert done.exit_code == 1
    assert "refused" in done.output
