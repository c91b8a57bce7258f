"""`skippipe serve`: real processes, encrypted connections and OpenAI's own client, held to transformers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest
import torch
from pydantic import BaseModel, ConfigDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.serving import metric
from skippipe.cli import main
from skippipe.inference.request import Detokenizer
from skippipe.transport.addresses import free_port
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from tests.helpers.model_folders import export_to
from tests.helpers.openai_corpus import CORPUS, body, check
from tests.helpers.processes import wait_for
from tests.helpers.serve_process import Command, Server

torch.set_num_threads(1)
TOKEN = "a-token-that-is-long-enough"
MODEL = "small"
WHOLE = {"stages": 3, "of": 3, "missing": []}
PATIENCE_S = 60.0
LONG = 100  # tokens of an answer during which nodes are killed
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
PROMPTS = ("some words", "said Emma", "Of what?", "and some more", "more words, some", "what", "Emma", ".")


class Theirs:
    """What transformers makes of the same folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.tokens = lru_cache(self._tokens)

    def _tokens(self, prompt: str, count: int) -> tuple[int, ...]:
        given = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        end = self.tokenizer.eos_token_id
        made = self._model.generate(given, max_new_tokens=count, do_sample=False, eos_token_id=end, pad_token_id=end)
        return tuple(made[0, given.shape[1] :].tolist())

    def with_logprobs(self, prompt: str, count: int, **settings: Any) -> tuple[list[int], torch.Tensor]:
        """Tokens, and the model's log-probabilities of all tokens at their places."""
        given = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        plain = {"eos_token_id": self.tokenizer.eos_token_id, "pad_token_id": 0, "do_sample": False}
        wanted = {"output_logits": True, "return_dict_in_generate": True}
        made = self._model.generate(given, max_new_tokens=count, **wanted, **(plain | settings))
        return made.sequences[0, given.shape[1] :].tolist(), torch.cat(made.logits).log_softmax(-1)

    def text(self, prompt: str, count: int) -> str:
        said = Detokenizer(self.tokenizer, self.tokenizer(prompt)["input_ids"])
        text = "".join(said.push(token) for token in self.tokens(prompt, count) if token != self.tokenizer.eos_token_id)
        return text + said.flush()

    def prompt_for(self, count: int) -> str:
        """One whose answer is that long."""
        return next(prompt for prompt in PROMPTS if len(self.tokens(prompt, count)) == count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("serving") / MODEL
    export_to(place, max_position_embeddings=512)
    file = place / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return place


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    return Theirs(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Three stages, two nodes each."""
    limits = ("--requests-a-minute", 10_000, "--max-tokens", 400)
    running = Server(folder, "--port", 0, *limits, environment={"SKIPPIPE_API_TOKEN": TOKEN})
    try:
        yield running
    finally:
        running.end()


def client(server: Server, token: str = TOKEN) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=token, max_retries=0, timeout=PATIENCE_S)


def health(server: Server) -> dict[str, Any]:
    return dict(httpx2.get(f"{server.address}/health", timeout=PATIENCE_S).json())


def streamed(ask: openai.OpenAI, prompt: str, hear: Callable[[int], None] = lambda count: None) -> tuple[str, Any]:
    """The text and the last chunk; `hear` is told how many chunks have come."""
    text, chunk = "", None
    pieces = ask.completions.create(model=MODEL, prompt=prompt, max_tokens=LONG, temperature=0, stream=True)
    for count, chunk in enumerate(pieces, 1):
        text += chunk.choices[0].text
        hear(count)
    return text, chunk


def test_many_at_once_get_the_answers_of_transformers(server: Server, theirs: Theirs) -> None:
    with client(server) as ask:

        def asked(prompt: str) -> openai.types.Completion:
            return ask.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0)

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(asked, PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = theirs.tokens(prompt, 40)
        assert answer.choices[0].text == theirs.text(prompt, 40)
        assert answer.choices[0].finish_reason == ("length" if len(tokens) == 40 else "stop")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(tokens)
        assert answer.usage.prompt_tokens == len(theirs.tokenizer(prompt)["input_ids"])
        assert answer.model_extra == {"skippipe": WHOLE}


def test_streams_conversations_and_stops(server: Server, theirs: Theirs) -> None:
    with client(server) as ask:
        prompt = theirs.prompt_for(LONG)
        whole = theirs.text(prompt, LONG)
        assert streamed(ask, prompt)[0] == whole
        stop = whole[len(whole) // 2 :][:3]
        raw = ask.completions.with_raw_response.create(
            model=MODEL, prompt=prompt, max_tokens=LONG, temperature=0, stop=[stop, "never said"]
        )
        assert raw.headers["x-skippipe-stages"] == "3/3"
        assert raw.parse().choices[0].text == whole.partition(stop)[0]
        assert raw.parse().choices[0].finish_reason == "stop"
        chunks = list(
            ask.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "some words"}],
                max_tokens=20,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        conversation = "user: some words\nassistant:"
        said = "".join(each.choices[0].delta.content or "" for each in chunks[:-1])
        assert said == theirs.text(conversation, 20)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(theirs.tokens(conversation, 20))
        drawn = [
            ask.completions.create(model=MODEL, prompt="some", max_tokens=20, temperature=1, seed=seed, n=2)
            for seed in (7, 7, 8)
        ]
        first, again, other = ([choice.text for choice in each.choices] for each in drawn)
        assert first == again != other
        assert first[0] != first[1]


def test_errors_are_those_that_the_client_knows(server: Server) -> None:
    with client(server) as ask:
        with pytest.raises(openai.NotFoundError):
            ask.completions.create(model="another", prompt="some")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as too_long:
            ask.completions.create(model=MODEL, prompt=["x" * 2000], max_tokens=10)
        assert too_long.value.code == "context_length_exceeded"
    with client(server, "a-token-that-nobody-gave") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    junk = httpx2.post(f"{server.address}/v1/completions", content=b'{"model":', headers=headers)
    assert (junk.status_code, junk.json()["error"]["code"]) == (400, "invalid_json")
    assert health(server) == {"status": "ok", **WHOLE}


@pytest.mark.slow
def test_the_corpus_of_requests_over_a_real_model(server: Server) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    with httpx2.Client(base_url=f"{server.address}/v1", headers=headers, timeout=PATIENCE_S) as ask:
        for entry in CORPUS:
            if entry.get("only") == "echo" or "from 1 to 4096" in entry.get("says", ""):
                continue
            few = {} if "max_completion_tokens" in entry["fields"] else {"max_tokens": 8}
            path = "/chat/completions" if entry["to"] == "chat" else "/completions"
            answer = ask.post(path, content=body(entry, MODEL, **few))
            check(entry, answer.status_code, answer.text)


SETTINGS = [  # OpenAI's fields, vLLM's beside them, and what transformers calls the same
    ({}, {"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"logit_bias": {"3": 2.5, "17": -100}}, {}, {"sequence_bias": {(3,): 2.5, (17,): -100.0}}),
    (
        {"logit_bias": {"5": 4.0}},
        {"repetition_penalty": 0.9, "ignore_eos": True},
        {"repetition_penalty": 0.9, "sequence_bias": {(5,): 4.0}},
    ),
    ({}, {"ignore_eos": True}, {}),
]


@pytest.mark.parametrize(("fields", "extra", "their_settings"), SETTINGS)
def test_settings_give_the_tokens_and_log_probabilities_of_transformers(
    server: Server, theirs: Theirs, fields: dict[str, Any], extra: dict[str, Any], their_settings: dict[str, Any]
) -> None:
    prompt = "some words, said Emma"
    end = None if extra.get("ignore_eos") else theirs.tokenizer.eos_token_id
    tokens, logprobs = theirs.with_logprobs(prompt, 24, eos_token_id=end, **their_settings)
    with client(server) as ask:
        found = (
            ask.completions.create(
                model=MODEL, prompt=prompt, max_tokens=24, temperature=0, logprobs=3, **fields, extra_body=extra
            )
            .choices[0]
            .logprobs
        )
        whole = (
            ask.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "some words"}],
                max_tokens=6,
                temperature=0,
                logprobs=True,
                top_logprobs=3,
            )
            .choices[0]
            .logprobs
        )
    assert found is not None and found.token_logprobs is not None and found.tokens is not None
    assert found.token_logprobs == pytest.approx(
        [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)], abs=1e-4
    )
    assert found.top_logprobs is not None
    for token, row, top in zip(tokens, logprobs, found.top_logprobs, strict=True):
        likeliest = row.topk(3).values.tolist()
        assert max(top.values()) == pytest.approx(likeliest[0], abs=1e-4)
        for logprob in top.values():  # fewer than three where tokens have the same text, as parts of characters do
            assert min(abs(logprob - value) for value in (*likeliest, float(row[token]))) < 1e-4
    assert whole is not None and whole.content is not None
    tokens, logprobs = theirs.with_logprobs("user: some words\nassistant:", 6)
    for content, token, row in zip(whole.content, tokens, logprobs, strict=True):
        assert content.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [each.logprob for each in content.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.slow  # test_logits_processor.py
def test_answers_in_json_are_what_the_schema_says(server: Server, theirs: Theirs) -> None:
    """Of a model that knows no JSON; and beside others that ask for nothing of the kind."""

    class Mood(BaseModel):
        model_config = ConfigDict(extra="forbid")
        sure: bool
        moods: list[Literal["glad", "sad", "neither"]]
        strength: Literal[1, 2, 3]

    prompt = theirs.prompt_for(40)
    with client(server) as ask, ThreadPoolExecutor(4) as pool:

        def plain(_number: int) -> str:
            return ask.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0).choices[0].text

        beside = pool.map(plain, range(3))
        answer = ask.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "how are you?"}],
            response_format=Mood,
            max_tokens=300,
            seed=4,
        )
        assert set(beside) == {theirs.text(prompt, 40)}
    assert isinstance(answer.choices[0].message.parsed, Mood)
    assert answer.choices[0].finish_reason == "stop"


def test_what_is_asked_and_missing_is_seen(server: Server) -> None:
    metrics = httpx2.get(f"{server.address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
    assert (metric(metrics, "stage_nodes"), metric(metrics, "recomputed_tokens_total")) == (6, 0)
    assert "skippipe_num_requests_running 0.0" in metrics and "skippipe_num_requests_waiting 0.0" in metrics
    assert re.search(r"^skippipe_time_to_first_token_seconds_count [1-9]", metrics, re.MULTILINE)
    server.says(r"^\S+Z? 127.0.0.1 POST /v1/chat/completions 200 \S+s prompt_tokens=\d+ tokens=\d+ stages=3/3 req_")
    assert re.match(r"skippipe \S+ starts to serve", server.lines[0])


def test_a_replica_goes_on_where_a_node_was_killed(server: Server, theirs: Theirs) -> None:
    """A single stream takes the nodes of the lowest numbers: one in the middle is killed, then one that samples."""
    prompt = theirs.prompt_for(LONG)
    whole = theirs.text(prompt, LONG)
    for node in ("stage1.0", "stage0.0"):

        def kill(count: int, node: str = node) -> None:
            if count == 20:
                server.kill(node)

        with client(server) as ask:
            text, last = streamed(ask, prompt, kill)
        assert text == whole
        assert last.model_extra == {"skippipe": WHOLE}
        server.says(rf"'{node}' has ended \(signal 9\) and is started again")
        server.back(node, 2)
    assert health(server)["status"] == "ok"


def test_ctrl_c_ends_all_and_says_so(server: Server, theirs: Theirs) -> None:
    pids = server.pids().values()
    asked = {"model": MODEL, "prompt": theirs.prompt_for(LONG), "max_tokens": LONG, "stream": True}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx2.stream(
        "POST", f"{server.address}/v1/completions", json=asked, headers=headers, timeout=PATIENCE_S
    ) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        server.send(signal.SIGINT)
        *_, last = lines
    assert last == "data: [DONE]" or json.loads(last[6:])["error"]["code"] == "unavailable"
    server.process.join(PATIENCE_S)
    assert server.end() == 130
    assert not [pid for pid in pids if is_there(pid)]
    assert "Traceback" not in "\n".join(server.lines)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere"], "no such folder"),
        (["--host", "0.0.0.0"], "name it with --token-file, or into SKIPPIPE_API_TOKEN"),
        (["--token-file", "open"], "chmod 600"),
        (["--token-file", "empty"], "has no token"),
        (["--token-file", "missing"], "cannot be read"),
        (["--min-coverage", "2"], "--min-coverage: 2 is not between 0 and 1"),
        (["--nodes", "2"], "2 nodes cannot hold 3 stages"),
        (["--nodes", "6", "--keys", "keys"], "leave it out"),
        (["--keys", "keys"], "peers.json: no such file"),
        (["--cache-tokens", "300"], "one answer may need 512"),
        (["--cut", "9"], "at most 5 stages, not 9"),
        (["--device", "tpu"], "expected cpu, cpu:K (K workers), cuda"),
        (["--port", "{taken}"], "cannot listen there"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(
    words: list[str],
    why: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content, mode in (("open", "a-token-that-is-long-enough", 0o644), ("empty", "\n", 0o600)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    place = [] if words == ["nowhere"] else [str(folder)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = [word.format(taken=taken.getsockname()[1]) for word in ("--port", "0", *words)]  # the last one counts
        monkeypatch.setattr(sys, "argv", ["skippipe", "serve", *place, *said])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_nodes_that_never_get_to_serve_end_the_server(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "damaged")
    sorted((tmp_path / "damaged").glob("*.safetensors"))[1].unlink()
    server = Server(tmp_path / "damaged", "--port", 0, "--nodes", 3)
    try:
        server.says(r"^'stage1.0' has ended .* and is started again in 2 s")
        server.process.join(PATIENCE_S)
        server.says(r"^error: node 'stage1.0' does not get to serve")
        assert server.process.exitcode == 2
        assert "Traceback" not in "\n".join(server.lines)
    finally:
        server.end()


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Nodes that join


class Joining:
    """A gateway, and nodes that nobody starts again."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder, self.place = folder, place
        own, pairs = KeyPair.new(), {name: KeyPair.new() for name in ("ann", "bob", "cem", "hub")}
        KeyFile("coordinator", own).save(place / "keys" / "coordinator.key")
        peers = PeerList({name: pair.public for name, pair in pairs.items()}, relays=("hub",))
        peers.save(place / "keys" / "peers.json")
        for name, pair in pairs.items():
            KeyFile(name, pair, own.public).save(place / f"{name}.key")
        self.at = f"127.0.0.1:{free_port('127.0.0.1')}"
        limits = ("--min-coverage", "2/3", "--wait-timeout", 0.5, "--grace", 0.5)
        options = ("--keys", place / "keys", "--listen", self.at, *limits)
        self.server = Server(folder, "--port", 0, *options)
        self.nodes: dict[str, Command] = {}

    def start(self, name: str, *options: object) -> None:
        self.nodes[name] = Command("node", "--join", self.at, "--key", self.place / f"{name}.key", *options)

    def start_relay(self) -> None:
        options = ("--join", self.at, "--key", self.place / "hub.key", "--listen", "127.0.0.1:0")
        self.nodes["hub"] = Command("relay", *options)

    def kill(self, name: str) -> None:
        self.nodes[name].end(signal.SIGKILL)

    def end(self) -> None:
        for command in (self.server, *self.nodes.values()):
            command.end(signal.SIGKILL)


@pytest.fixture
def joining(folder: Path, tmp_path: Path) -> Iterator[Joining]:
    running = Joining(folder, tmp_path)
    try:
        yield running
    finally:
        running.end()


@pytest.mark.slow
def test_all_only_call_out_and_meet_at_a_relay(joining: Joining, theirs: Theirs) -> None:
    for name in ("ann", "bob", "cem"):
        joining.start(name, "--listen", "none")
    apart = {"status": "down", "stages": 0, "of": 3, "missing": [1, 2], "broken_hops": [[0, 1], [1, 2], [2, 0]]}
    wait_for(lambda: health(joining.server) == apart)
    joining.kill("ann")
    joining.start("ann")  # which bob and cem can call, but not each other
    partly = {"stages": 2, "of": 3, "missing": [2]}
    wait_for(lambda: health(joining.server) == {"status": "degraded", **partly, "broken_hops": [[1, 2]]})
    prompt = theirs.prompt_for(LONG)
    with client(joining.server) as ask:
        answer = ask.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
        assert answer.model_extra == {"skippipe": partly}
        joining.start_relay()
        wait_for(lambda: health(joining.server) == {"status": "ok", **WHOLE})
        answer = ask.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0)
        assert answer.choices[0].text == theirs.text(prompt, 40)
        assert answer.model_extra == {"skippipe": WHOLE}


def test_stages_that_nobody_holds_are_left_out_down_to_the_floor(
    joining: Joining, theirs: Theirs, folder: Path, tmp_path: Path
) -> None:
    """One of the nodes can only call out, and comes back as such."""
    for name in ("ann", "cem"):
        joining.start(name)
    joining.start("bob", "--listen", "none")
    server = joining.server
    prompt = theirs.prompt_for(LONG)

    def kill(count: int) -> None:
        if count == 20:
            joining.kill("cem")

    with client(server) as ask:
        text, last = streamed(ask, prompt, kill)
        assert last.model_extra == {"skippipe": {"stages": 2, "of": 3, "missing": [2]}}
        assert last.choices[0].finish_reason == "length"
        assert text[:20] == theirs.text(prompt, LONG)[:20]
        assert health(server) == {"status": "degraded", "stages": 2, "of": 3, "missing": [2]}
        joining.kill("bob")
        with pytest.raises(openai.InternalServerError, match="too few stages") as refused:
            ask.completions.create(model=MODEL, prompt="some", max_tokens=5)
        assert (refused.value.status_code, refused.value.code) == (503, "unavailable")
        assert health(server) == {"status": "down", "stages": 0, "of": 3, "missing": [1, 2]}
        shutil.copytree(folder, tmp_path / "copy")
        joining.start("bob", "--listen", "none")
        joining.start("cem", "--checkpoint", tmp_path / "copy")
        for name in ("bob", "cem"):
            server.back(name, 2)
        wait_for(lambda: health(server) == {"status": "ok", **WHOLE})
        answer = ask.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0)
        assert answer.choices[0].text == theirs.text(prompt, 40)
        assert answer.model_extra == {"skippipe": WHOLE}
    assert server.end(signal.SIGTERM) == 143
    for node in joining.nodes.values():
        node.process.join(PATIENCE_S)
        assert node.process.exitcode == 0
