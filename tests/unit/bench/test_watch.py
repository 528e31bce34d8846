"""The engine's own figures, read while a load runs."""

from __future__ import annotations

import http.server
import threading

import pytest

from vllm_fleet.bench.watch import Sample, Watch, between, parse

PAGE = """\
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 2.0
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 20.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""


def sample(at: float, **values: float) -> Sample:
    names = {
        "ttft_sum": "vllm:time_to_first_token_seconds_sum",
        "ttft_count": "vllm:time_to_first_token_seconds_count",
        "out": "vllm:generation_tokens_total",
        "kv": "vllm:kv_cache_usage_perc",
        "preempted": "vllm:num_preemptions_total",
        "memory": "process_resident_memory_bytes",
    }
    return Sample(at, {names[key]: value for key, value in values.items()})


def test_a_page_is_summed_over_engines() -> None:
    found = parse(PAGE, 5.0)
    assert found.get("vllm:prompt_tokens_total") == 120
    assert found.get("vllm:time_to_first_token_seconds_sum") == 2.0
    assert found.get("nothing", "vllm:num_requests_running") == 3.0
    assert not any(name.endswith("_bucket") for name in found.values)


def test_what_was_counted_in_a_window() -> None:
    samples = [
        sample(0, ttft_sum=1, ttft_count=1, out=10, kv=0.1, preempted=0, memory=100),
        sample(9, ttft_sum=1, ttft_count=1, out=10, kv=0.0, preempted=0, memory=100),
        sample(12, ttft_sum=3, ttft_count=5, out=40, kv=0.9, preempted=2, memory=120),
        sample(21, ttft_sum=5, ttft_count=11, out=90, kv=0.2, preempted=2, memory=130),
        sample(30, ttft_sum=50, ttft_count=20, out=900, kv=1.0, preempted=9, memory=130),
    ]
    found = between(samples, 10, 20)
    assert found is not None
    assert found.means == {"first_token": pytest.approx(0.4)}
    assert found.counts["first_token"] == 10
    assert (found.tokens_out, found.preemptions, found.kv_usage) == (80, 2, 0.9)
    assert found.memory == ((-1, 100), (2, 120), (11, 130))
    assert between(samples, -5, 20) is None  # no reading before it
    assert between(samples, 10, 31) is None  # nor after


def test_a_page_is_read_again_and_again() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = PAGE.encode() if self.path == "/metrics" else b'{"error": "no"}'
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with Watch(f"{address}/metrics", every=0.01) as watch:
            while len(watch.samples) < 3:
                pass
        assert watch.of_vllm
        with Watch(f"{address}/other", every=1) as other:
            pass
        assert not other.of_vllm
        assert other.lost == "what it answers is no page of metrics"
        server.shutdown()
