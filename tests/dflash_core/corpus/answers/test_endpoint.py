"""Answers from a real HTTP server on this machine that behaves as OpenAI-compatible ones do."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash_core.corpus.answers.endpoint import endpoint_generate
from dflash_core.corpus.answers.regenerate import TurnPrompt
from dflash_core.corpus.config import CorpusConfig, EndpointConfig, RegenerateConfig
from dflash_core.corpus.reading.chats import convert_row
from dflash_core.errors import ConfigError, DFlashError

PROMPTS = [TurnPrompt(({"role": "user", "content": str(k)},), name=str(k)) for k in range(20)]


class Server(ThreadingHTTPServer):
    statuses: list[int]
    longest: int | None = None
    requests: list[tuple[str, dict, str | None]]
    reply: dict | None = None
    num_cut: int = 0
    daemon_threads = True


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers.get("Authorization")))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        asked = body["messages"][-1]["content"]
        if self.server.longest is not None and len(asked) > self.server.longest:
            status = 400
        message = {"role": "assistant", "content": asked + "!"}
        reply = self.server.reply or {
            "choices": [{"message": message, "finish_reason": "length"}],
            "usage": {"completion_tokens": 2},
        }
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        cut = len(self.server.requests) <= self.server.num_cut
        self.wfile.write(data[: len(data) // 2] if cut else data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(("127.0.0.1", 0), Handler)
    running.statuses, running.requests = [], []
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def at(url: str, **fields) -> CorpusConfig:
    endpoint = EndpointConfig(url=url, model="m", pause_s=0.0, **fields)
    return CorpusConfig(regenerate=RegenerateConfig(endpoint=endpoint))


def config(server: Server, **fields) -> CorpusConfig:
    return at(f"http://127.0.0.1:{server.server_port}/v1", **fields)


def test_the_servers_template_is_told_what_ours_is(server: Server) -> None:
    told = config(server).model_copy(update={"template_variables": {"enable_thinking": False}})
    endpoint_generate(told)(PROMPTS[:1])
    endpoint_generate(config(server))(PROMPTS[:1])
    bodies = [body for _, body, _ in server.requests]
    assert bodies[0].pop("chat_template_kwargs") == {"enable_thinking": False}
    assert bodies[0] == bodies[1]


def test_answers_come_in_the_order_of_the_prompts(server: Server) -> None:
    answers = endpoint_generate(config(server), api_key="secret")(PROMPTS)
    assert [answer.content for answer in answers] == [f"{k}!" for k in range(20)]
    assert (answers[0].finish_reason, answers[0].num_tokens) == ("length", 2)
    path, body, key = server.requests[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 512)
    assert len({body["seed"] for _, body, _ in server.requests}) == len(PROMPTS)


def test_tool_calls_are_sent_as_a_strict_server_takes_them(server: Server) -> None:
    def call(name: str, x: int) -> dict:
        return {"type": "function", "function": {"name": name, "arguments": f'{{"x": {x}}}'}}

    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", 1), call("g", 2)]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "bad", "weight": 0},
        {"role": "assistant", "content": "", "tool_calls": [call("f", 3)]},
        {"role": "tool", "content": "three"},
    ]
    (chat,) = convert_row({"messages": messages})
    endpoint_generate(config(server))([TurnPrompt(chat.messages)])
    ids = ["call00000", "call00001", "call00002"]
    pair = [{"id": ids[0], **call("f", 1)}, {"id": ids[1], **call("g", 2)}]
    assert server.requests[0][1]["messages"] == [
        messages[0],
        {**messages[1], "tool_calls": pair},
        {**messages[2], "tool_call_id": ids[0]},
        {**messages[3], "tool_call_id": ids[1]},
        {"role": "assistant", "content": "bad"},
        {**messages[5], "tool_calls": [{"id": ids[2], **call("f", 3)}]},
        {**messages[6], "tool_call_id": ids[2]},
    ]


def test_busy_server_is_asked_again(server: Server) -> None:
    server.statuses = [503, 429]
    assert endpoint_generate(config(server))(PROMPTS[:1])[0].content == "0!"
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [200, 503])
def test_server_that_dies_in_the_middle_of_a_reply_is_asked_again(server: Server, status) -> None:
    server.num_cut, server.statuses = 2, [status] * 2
    assert endpoint_generate(config(server))(PROMPTS[:1])[0].content == "0!"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("head", "num_taken"),
    [
        (b"no HTTP at all\r\n", 65_536),
        (b"HTTP/1.1 503 \r\nContent-Length: 9\r\n\r\n", 1),  # the rest unread: ends in a reset
    ],
)
def test_reply_that_breaks_off_is_told_and_can_be_taken_up(head: bytes, num_taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def break_off() -> None:
            for _ in range(2):
                client, _ = listener.accept()
                with client:
                    client.recv(num_taken)
                    client.sendall(head)

        thread = threading.Thread(target=break_off, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        gone = at(url, num_tries=2)
        with pytest.raises(DFlashError, match=r"did not answer after 2 tries .*where it stopped"):
            endpoint_generate(gone)(PROMPTS[:1])
        thread.join()


def test_server_that_stays_busy_stops_the_run_resumably(server: Server) -> None:
    server.statuses = [503] * 9
    with pytest.raises(DFlashError, match=r"after 2 tries \(status 503.*goes on where it stopped"):
        endpoint_generate(config(server, num_tries=2))(PROMPTS[:1])


def test_refused_request_is_not_repeated(server: Server) -> None:
    server.statuses = [404]
    with pytest.raises(ConfigError, match="refuses the request with status 404"):
        endpoint_generate(config(server))(PROMPTS[:1])
    assert len(server.requests) == 1


@pytest.mark.parametrize("alone", [False, True])
def test_prompt_that_is_refused_does_not_stop_the_others(server: Server, alone: bool) -> None:
    server.longest = 10
    long = TurnPrompt(({"role": "user", "content": "x" * 11},))
    *rest, refused = endpoint_generate(config(server))([*PROMPTS[: 0 if alone else 3], long])
    assert [answer.content for answer in rest] == ([] if alone else ["0!", "1!", "2!"])
    assert (refused.content, refused.finish_reason) == ("", "refused")
    assert refused.refusal.startswith("status 400")


@pytest.mark.parametrize("status", [400, 413, 422])
def test_server_that_refuses_every_prompt_stops_the_run(server: Server, status: int) -> None:
    server.statuses = [status] * 4
    with pytest.raises(ConfigError, match=f"refuses every prompt with status {status}"):
        endpoint_generate(config(server))(PROMPTS[:3])
    assert server.requests[-1][1]["messages"] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("status", [401, 403])
def test_request_that_is_not_allowed_stops_the_run(server: Server, status: int) -> None:
    server.statuses = [status]
    with pytest.raises(ConfigError, match=f"refuses the request with status {status}"):
        endpoint_generate(config(server, num_parallel=1))(PROMPTS[:3])


def test_server_that_is_not_there_is_named(server: Server) -> None:
    gone = at("http://127.0.0.1:9/v1", num_tries=2)
    with pytest.raises(DFlashError, match="9/v1/chat/completions did not answer"):
        endpoint_generate(gone)(PROMPTS[:1])


def test_other_replies_are_shown(server: Server) -> None:
    server.reply = {"error": "no such thing"}
    with pytest.raises(ConfigError, match="no such thing"):
        endpoint_generate(config(server))(PROMPTS[:1])


def test_thoughts_that_the_server_splits_off_are_kept(server: Server) -> None:
    message = {"content": "a", "reasoning_content": "r"}
    server.reply = {"choices": [{"message": message}]}
    (answer,) = endpoint_generate(config(server))(PROMPTS[:1])
    assert (answer.content, answer.reasoning_content) == ("a", "r")
