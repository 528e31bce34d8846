"""Constant load through a gateway, and what became of every request."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True)
class Answer:
    """One request: when it was sent (seconds since the epoch), for what, and how it ended."""

    id: str
    model: str
    sent: float
    ended: float
    status: int  # 0 where no whole answer came
    problem: str

    @property
    def good(self) -> bool:
        """Whether a whole answer came."""
        return self.status == 200 and not self.problem


class Load:
    """Requests at a constant rate, each on its own, whatever the earlier ones do."""

    def __init__(
        self,
        url: str,
        key: str,
        models: tuple[str, ...],
        rate: float = 5,
        tokens: tuple[int, ...] = (4,),
    ) -> None:
        self.url, self.key, self.models = url, key, models
        self.rate, self.tokens = rate, tokens  # tokens: of the answers, in turn
        self.answers: list[Answer] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._pace = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._pace.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pace.join()
        for thread in self._threads:
            thread.join(330)

    def _run(self) -> None:
        number, began = 0, time.monotonic()
        while not self._stop.is_set():
            model = self.models[number % len(self.models)]
            tokens = self.tokens[number % len(self.tokens)]
            asked = (model, number % 3 == 0, tokens)
            thread = threading.Thread(target=self._ask, args=asked, daemon=True)
            thread.start()
            self._threads.append(thread)
            number += 1
            self._stop.wait(max(0.0, began + number / self.rate - time.monotonic()))

    def _ask(self, model: str, stream: bool, tokens: int) -> None:
        request_id, sent = uuid.uuid4().hex, time.time()
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"Say something, {request_id}"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {
                "Authorization": f"Bearer {self.key}",
                "Content-Type": "application/json",
                "X-Request-Id": request_id,
            },
        )
        status, problem = 0, ""
        try:
            with urllib.request.urlopen(request, timeout=320) as answer:
                text = answer.read().decode()
                status = answer.status
            if stream and "[DONE]" not in text:
                problem = f"the stream ended early: {text[-200:]}"
            elif '"error"' in text:
                problem = text[-300:]
        except urllib.error.HTTPError as error:
            status, problem = error.code, error.read().decode()[-300:]
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        with self._lock:
            self.answers.append(Answer(request_id, model, sent, time.time(), status, problem))

    @property
    def bad(self) -> list[Answer]:
        """Requests without a whole answer."""
        with self._lock:
            return [answer for answer in self.answers if not answer.good]
