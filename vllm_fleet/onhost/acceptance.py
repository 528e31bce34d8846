"""Ask one instance what clients ask, and measure: the same questions before and after a change.

Runs as root with the host's own Python, standard library only. Reads one JSON object from
standard input: ``{"instance", "port", "model", "task", "tools", "probes", "answer_tokens",
"seconds"}`` and prints ``result`` and what it found as its last line. Judges nothing; see
vllm_fleet/rollout/acceptance.py. Questions go past the gate with the token of the start, so
that an instance that is out of its pool can be asked, and none of them counts as a client's.
"""

import http.client
import json
import os
import re
import secrets
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

Json = Dict[str, Any]

RUN = "/run/vllm"
ETC = "/etc/vllm"
STATE = "/var/lib/vllm"
LONG_WORDS = 4096
TIMED_TOKENS = 64  # enough for a rate, and the same number on every version
TOO_LONG = ("maximum context length", "max_model_len", "max model len", "longer than", "too long")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Failure(Exception):
    """A question that was not answered as it must be."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """Asks one server of this host."""

    def __init__(self, port: int, token: str, api_key: str, seconds: float) -> None:
        self._port = port
        self._seconds = seconds
        self._headers = {"Content-Type": "application/json", "X-Fleet-Token": token}
        if api_key:
            self._headers["Authorization"] = "Bearer " + api_key

    def post(self, path: str, body: Json) -> Json:
        """The JSON answer. Raises Failure on another status, on silence, on no JSON."""
        deadline = time.monotonic() + self._seconds
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._seconds)
        try:
            connection.request("POST", path, json.dumps(body), self._headers)
            response = connection.getresponse()
            text = b""
            while chunk := response.read1(65536):
                text += chunk
                self._in_time(deadline, connection)
            if response.status != 200:
                raise Failure(
                    "%s answered %d: %s"
                    % (path, response.status, text[:300].decode("utf-8", "replace")),
                    response.status,
                )
            answer = json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Failure("%s: %s" % (path, self._reason(error))) from error
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise Failure("%s gave no JSON object" % path)
        return answer

    def stream(self, path: str, body: Json) -> Json:
        """Read a stream to its end: seconds to the first token, seconds in all, tokens.

        Raises Failure where it breaks, or does not end in time.
        """
        begun = time.monotonic()
        deadline = begun + self._seconds
        first: Optional[float] = None
        tokens, finish, usage = 0, None, None
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._seconds)
        try:
            connection.request(
                "POST",
                path,
                json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}),
                self._headers,
            )
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(300).decode("utf-8", "replace")
                raise Failure(
                    "%s (stream) answered %d: %s" % (path, response.status, text), response.status
                )
            for line in response:
                self._in_time(deadline, connection)
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    break
                event = json.loads(data)
                if "error" in event:
                    raise Failure("%s (stream) broke: %s" % (path, str(event["error"])[:300]))
                usage = event.get("usage") or usage
                for choice in event.get("choices") or []:
                    finish = choice.get("finish_reason") or finish
                    if any(v for k, v in (choice.get("delta") or {}).items() if k != "role"):
                        first = first if first is not None else time.monotonic()
                        tokens += 1
            else:
                raise Failure("%s (stream) ended without [DONE] after %d chunks" % (path, tokens))
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, TimeoutError) and tokens:
                raise Failure(
                    "%s (stream) was not over after %g s" % (path, self._seconds)
                ) from None
            raise Failure("%s (stream): %s" % (path, self._reason(error))) from error
        finally:
            connection.close()
        ended = time.monotonic()
        if first is None:
            raise Failure("%s (stream) held no token" % path)
        return {
            "first": first - begun,
            "rest": ended - first,
            "tokens": int((usage or {}).get("completion_tokens") or tokens),
            "finish": finish,
        }

    def _in_time(self, deadline: float, connection: http.client.HTTPConnection) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Failure("was not over after %g s" % self._seconds)
        if connection.sock is not None:
            connection.sock.settimeout(left)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return "no answer within %g s" % self._seconds
        return str(error) or type(error).__name__


class Probe:
    """The questions of one task, and what came of them."""

    def __init__(self, client: Client, order: Json) -> None:
        self.client = client
        self.model = order["model"]
        self.order = order
        self.failures: List[Json] = []
        self.found: Json = {}
        # Of a model with short requests the questions and answers of a talk must still fit in.
        longest = order.get("longest") or 1 << 20
        self.answer_tokens = max(8, min(int(order["answer_tokens"]), longest // 8))
        self.timed_tokens = max(8, min(TIMED_TOKENS, longest // 4))
        # No answer out of a cache of prefixes, neither of this probe nor of the one before.
        self.nonce = secrets.token_hex(4)

    def run(self) -> Json:
        """Ask everything; one failure does not keep the others from being asked."""
        begun = time.monotonic()
        questions = {
            "chat": self.chat_questions,
            "embed": self.embed_questions,
            "rerank": self.rerank_questions,
        }[self.order["task"]]()
        asked = 0
        for name, ask in questions:
            asked += 1
            try:
                ask()
            except Failure as failure:
                self.failures.append({"name": name, "why": str(failure)})
        return {
            **self.found,
            "asked": asked,
            "failures": self.failures,
            "seconds": round(time.monotonic() - begun, 2),
        }

    # --- chat

    def chat(self, messages: List[Json], **more: Any) -> Json:
        path = "/v1/chat/completions"
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.answer_tokens,
        }
        answer = self.client.post(path, {**body, **more})
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or "message" not in choices[0]:
            raise Failure("%s answered without choices: %s" % (path, json.dumps(answer)[:200]))
        choice: Json = choices[0]
        if choice.get("finish_reason") is None:
            raise Failure("%s gave an answer that is not finished" % path)
        return choice

    def chat_questions(self) -> List[Tuple[str, Callable[[], None]]]:
        questions: List[Tuple[str, Callable[[], None]]] = [
            ("timed streams", self.timed),
            ("conversation of three turns", self.conversation),
            ("long prompt", self.long_prompt),
        ]
        if self.order.get("tools"):
            questions.append(("tools", self.tools))
        return questions

    def timed(self) -> None:
        """Streams of the same number of tokens, one after the other, the first not counted."""
        firsts, rates = [], []
        for number in range(int(self.order["probes"]) + 1):
            text = "%s %d. Tell me a story about the sea." % (self.nonce, number)
            seen = self.client.stream(
                "/v1/chat/completions",
                {
                    "model": self.model,
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": self.timed_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            )
            if number == 0:
                continue
            firsts.append(seen["first"])
            if seen["tokens"] > 1 and seen["rest"] > 0:
                rates.append((seen["tokens"] - 1) / seen["rest"])
        self.found["first_token_seconds"] = round(statistics.median(firsts), 5)
        if rates:
            self.found["tokens_per_second"] = round(statistics.median(rates), 2)

    def conversation(self) -> None:
        """Turns that build on each other; every answer must end.

        The same words on every version: nothing of it is timed, and which answers end by
        themselves can only be compared for the same questions.
        """
        ended, answers, thought = 0, 0, False
        messages: List[Json] = []
        for text in (
            "My name is Ada. Answer in one short sentence: how are you?",
            "What is two plus two? Answer with the number alone.",
            "What is my name? Answer with the name alone.",
        ):
            messages.append({"role": "user", "content": text})
            choice = self.chat(messages, temperature=0)
            answers += 1
            ended += choice["finish_reason"] == "stop"
            message = choice["message"]
            thought = thought or bool(message.get("reasoning") or message.get("reasoning_content"))
            messages.append({"role": "assistant", "content": message.get("content") or ""})
        self.found.update(answers=answers, ended=ended, reasoning=thought)

    def long_prompt(self) -> None:
        """A prompt that takes several steps of prefill; halved while it is too long."""
        words = LONG_WORDS
        while True:
            try:
                text = self.nonce + " " + " ".join(["hello"] * words)
                self.chat([{"role": "user", "content": text}], max_tokens=8)
                self.found["long_prompt_words"] = words
                return
            except Failure as failure:
                too_long = any(part in str(failure).lower() for part in TOO_LONG)
                if failure.status != 400 or not too_long or words == 1:
                    raise
            words //= 2

    def tools(self) -> None:
        """A question that asks for a tool; whether it was called."""
        text = "%s. What is the weather in Paris? Use the tool." % self.nonce
        choice = self.chat([{"role": "user", "content": text}], tools=[TOOL], temperature=0)
        calls = choice["message"].get("tool_calls") or []
        for call in calls:
            try:
                json.loads(call["function"]["arguments"])
            except (KeyError, TypeError, ValueError):
                raise Failure("a tool was called without arguments in JSON") from None
        self.found["tool_called"] = bool(calls)

    # --- embeddings and rankings: one answer, so only its time counts

    def one_answer(self, path: str, body: Callable[[str], Json], key: str) -> Callable[[], None]:
        def ask() -> None:
            times = []
            for number in range(int(self.order["probes"]) + 1):
                begun = time.monotonic()
                answer = self.client.post(path, body("%s %d" % (self.nonce, number)))
                if not answer.get(key):
                    raise Failure("%s answered without %s" % (path, key))
                if number:
                    times.append(time.monotonic() - begun)
            self.found["first_token_seconds"] = round(statistics.median(times), 5)

        return ask

    def embed_questions(self) -> List[Tuple[str, Callable[[], None]]]:
        def body(text: str) -> Json:
            return {"model": self.model, "input": [text + " text number %d" % i for i in range(8)]}

        return [("timed embeddings", self.one_answer("/v1/embeddings", body, "data"))]

    def rerank_questions(self) -> List[Tuple[str, Callable[[], None]]]:
        def body(text: str) -> Json:
            documents = ["Paris is the capital.", "Bread is baked.", text]
            return {"model": self.model, "query": "Which is the capital?", "documents": documents}

        return [("timed rankings", self.one_answer("/v1/rerank", body, "results"))]


def text_of(path: str) -> str:
    """Text of a file, or "" where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def api_key(name: str) -> str:
    """The key that the instance itself asks for, where the operator set one."""
    match = re.search(r'^VLLM_API_KEY="?([^"\n]*)"?$', text_of("%s/%s.env" % (ETC, name)), re.M)
    return match.group(1) if match else ""


def longest_request(name: str) -> Optional[int]:
    """Tokens of the longest request, as the warm-up of this start was told."""
    try:
        found = json.loads(text_of(os.path.join(STATE, name, "warmup.json")))["max_model_len"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


def main() -> int:
    """Ask what stands on standard input."""
    order = json.load(sys.stdin)
    name = order["instance"]
    token = text_of(os.path.join(RUN, name, "token")).strip()
    client = Client(int(order["port"]), token, api_key(name), float(order["seconds"]))
    order["longest"] = longest_request(name)
    print("result " + json.dumps(Probe(client, order).run()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
