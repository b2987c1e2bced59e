"""n, best_of, echo, prompt_logprobs and the sampling fields in the OpenAI dialect, over real HTTP."""

from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeHost, Gate, wait_until
from test_api_openai import HELLO, chat, complete, events

from mlxserve.api.openai.reply import CompletionReply
from mlxserve.core.generation import PromptLogprobs
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import SampledToken, TokenLogprobs
from mlxserve.errors import EngineError, InvalidParameter, QueueFull


def test_sampling_fields_reach_the_engine(host: FakeHost, http: httpx.Client) -> None:
    fields: dict[str, Any] = {
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "repeat_last_n": 64,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "min_tokens": 3,
        "prompt_logprobs": 2,
    }
    wire = {"logit_bias": {"5": -100, "61": 2.5}, "stop_token_ids": [4, 9, 4]}
    assert chat(http, **fields, **wire).status_code == 200
    assert complete(http, **fields, **wire).status_code == 200
    expected = SamplingParams(**fields, logit_bias=((5, -100), (61, 2.5)), stop_token_ids=frozenset({4, 9}))
    in_chat, in_completion = (request.sampling for request in host.requests)
    assert in_chat == expected
    assert (in_completion.logit_bias, in_completion.max_tokens) == (expected.logit_bias, 16)


def test_model_defaults_of_penalties_apply_where_the_client_gave_none(host: FakeHost, http: httpx.Client) -> None:
    host.default_sampling = {"repetition_penalty": 1.1, "presence_penalty": 1.5, "repeat_last_n": 64}
    chat(http, presence_penalty=0)
    assert host.requests[0].sampling == SamplingParams(repetition_penalty=1.1, repeat_last_n=64)


class TestSamples:
    @pytest.mark.parametrize("kind", [chat, complete])
    def test_choices_have_their_index_and_the_prompt_counts_once(
        self, host: FakeHost, http: httpx.Client, kind
    ) -> None:
        host.script.sample_texts = ("one", "three", "five!")
        host.script.num_cached_tokens = 1
        reply = kind(http, n=3, seed=7).json()
        texts = [choice["message"]["content"] if kind is chat else choice["text"] for choice in reply["choices"]]
        assert texts == ["one", "three", "five!"]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert reply["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 13,
            "total_tokens": 15,
            # What the first one found; that the others found the first one's is no saving of the client's.
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        assert len(host.requests) == 1

    def test_streamed(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script.sample_texts = ("one", "three")
        texts, reasons, roles, usage = ["", ""], [None, None], [0, 0], None
        for chunk in client.chat.completions.create(
            model="fake", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role == "assistant"
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert (texts, reasons, roles) == (["one", "three"], ["stop", "stop"], [1, 1])
        assert (usage.prompt_tokens, usage.completion_tokens) == (2, 8)

    def test_of_several_prompts_in_order(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script.sample_texts = ("a", "bc")
        reply = client.completions.create(model="fake", prompt=["x", "yy"], n=2)
        assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "a"), (1, "bc"), (2, "a"), (3, "bc")]
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 6)

    @pytest.mark.parametrize("stream", [False, True])
    def test_one_that_fails_cancels_all(self, host: FakeHost, http: httpx.Client, stream: bool) -> None:
        host.script.sample_texts = ("x", "endless " * 2000)
        host.script.failure = EngineError("the engine failed while computing this request")
        response = chat(http, n=2, stream=stream)
        if stream:
            assert events_until_error(response)["code"] == "engine_error"
        else:
            assert response.status_code == 500
        wait_until(lambda: host.cancelled == [f"{host.requests[0].request_id}-1"])

    def test_a_client_that_leaves_cancels_all(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.endless = True
        with http.stream(
            "POST", "/v1/chat/completions", json={"model": "fake", "messages": HELLO, "n": 3, "stream": True}
        ) as response:
            next(response.iter_bytes())
        name = host.requests[0].request_id
        wait_until(lambda: sorted(host.cancelled) == [f"{name}-{index}" for index in range(3)])

    @pytest.mark.parametrize(
        "refusal",
        [QueueFull("full", retry_after=2.0), InvalidParameter("logit_bias: no such token", param="logit_bias")],
    )
    def test_refused_together(self, host: FakeHost, http: httpx.Client, refusal: Exception) -> None:
        host.script.refusal = refusal
        response = chat(http, n=4)
        assert response.status_code == (429 if isinstance(refusal, QueueFull) else 400)

    def test_the_first_token_is_waited_for_without_holding_up_headers(self, host: FakeHost, http: httpx.Client) -> None:
        gate = host.script.first_token = Gate()
        with http.stream(
            "POST", "/v1/completions", json={"model": "fake", "prompt": "Hi", "n": 2, "stream": True}
        ) as response:
            assert response.status_code == 200
            gate.open()
            response.read()


def events_until_error(response: httpx.Response) -> dict[str, Any]:
    *_, last = events(response)
    return last["error"]


class TestBestOf:
    def test_the_likeliest_a_token_are_shown_best_first(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script.sample_texts = ("a long one", "mid", "top", "")
        host.script.sample_logprobs = (-0.9, -0.4, -0.1, 0.0)
        reply = client.completions.create(model="fake", prompt="Hi", n=2, best_of=4)
        assert [(choice.index, choice.text, choice.logprobs) for choice in reply.choices] == [
            (0, "top", None),
            (1, "mid", None),
        ]
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 16)

    def test_all_are_shown_in_order_where_n_is_as_many(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script.sample_texts = ("a", "b")
        host.script.sample_logprobs = (-0.9, -0.4)
        reply = client.completions.create(model="fake", prompt="Hi", n=2, best_of=2, logprobs=1)
        assert [choice.text for choice in reply.choices] == ["a", "b"]
        assert [choice.logprobs.token_logprobs for choice in reply.choices] == [[-0.9], [-0.4]]

    def test_offsets_are_those_of_the_shown_text(self, host: FakeHost, client: openai.OpenAI) -> None:
        host.script.sample_texts = ("long", "ab")
        host.script.sample_logprobs = (-0.9, -0.4)
        reply = client.completions.create(model="fake", prompt=["Hi", "Ho"], best_of=2, logprobs=0)
        assert [choice.logprobs.text_offset for choice in reply.choices] == [[0, 1], [0, 1]]


class TestEcho:
    @pytest.mark.parametrize("prompt", ["Hé", [72, 0xC3, 0xA9]], ids=["text", "tokens"])
    def test_texts_begin_with_the_prompt(self, host: FakeHost, http: httpx.Client, prompt: Any) -> None:
        host.script.text = "y"
        reply = complete(http, prompt=prompt, echo=True, n=2).json()
        assert [choice["text"] for choice in reply["choices"]] == ["Héy", "Héy"]
        streamed = events(complete(http, prompt=prompt, echo=True, n=2, stream=True))
        assert joined(streamed) == ["Héy", "Héy"]
        assert all(request.sampling.prompt_logprobs is None for request in host.requests)

    @pytest.mark.parametrize("stream", [False, True])
    def test_logprobs_go_on_from_the_prompt_to_the_answer(
        self, host: FakeHost, http: httpx.Client, stream: bool
    ) -> None:
        host.script.text = "yz"
        response = complete(http, prompt="Hé", echo=True, logprobs=1, n=2, stream=stream)
        if stream:
            chunks = events(response)
            assert joined(chunks) == ["Héyz", "Héyz"]
            choices = [merged(chunks, index) for index in range(2)]
        else:
            choices = [choice["logprobs"] for choice in response.json()["choices"]]
        for logprobs in choices:
            assert logprobs["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9", "y", "z"]
            assert logprobs["token_logprobs"] == [None, -1.95, -1.69, -0.5, -0.5]
            assert logprobs["top_logprobs"] == [
                None,
                {"\x00": -0.25, "bytes:\\xc3": -1.95},
                {"\x00": -0.25, "bytes:\\xa9": -1.69},
                {"y": -0.5},
                {"z": -0.5},
            ]
            assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
        assert [request.sampling.prompt_logprobs for request in host.requests] == [1]

    def test_offsets_count_characters(self, host: FakeHost, http: httpx.Client) -> None:
        logprobs = complete(http, prompt="é" * 1500, echo=True, logprobs=0).json()["choices"][0]["logprobs"]
        assert logprobs["text_offset"][2998:3001] == [1499, 1499, 1500]

    def test_the_answer_is_best_of_and_the_prompt_before_it(self, host: FakeHost, http: httpx.Client) -> None:
        host.script.sample_texts = ("a", "b")
        host.script.sample_logprobs = (-0.9, -0.4)
        (choice,) = complete(http, prompt="Hi", echo=True, best_of=2).json()["choices"]
        assert choice["text"] == "Hib"


def joined(chunks: list[Any]) -> list[str]:
    texts = ["", ""]
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def merged(chunks: list[Any], index: int) -> dict[str, list[Any]]:
    parts = [
        choice["logprobs"]
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        if choice["index"] == index and choice["logprobs"]
    ]
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


@pytest.mark.parametrize("kind", [chat, complete])
def test_prompt_logprobs_stand_in_every_choice(host: FakeHost, http: httpx.Client, kind) -> None:
    reply = kind(http, prompt_logprobs=1, n=2).json()
    for choice in reply["choices"]:
        assert choice["prompt_logprobs"] == [
            None,
            {"105": {"logprob": -1.05, "decoded_token": "i"}, "0": {"logprob": -0.25, "decoded_token": "\x00"}},
        ]
    plain = kind(http).json()["choices"][0]
    assert "prompt_logprobs" not in plain


def test_what_the_tokenizer_put_before_the_prompt_is_no_part_of_its_text() -> None:
    reply = CompletionReply(
        lambda token_id: {1: b"<s>", 2: b"Hi", 3: b"!"}[token_id], num_logprobs=0, num_choices=1, echoes=["Hi!"]
    )
    scored = TokenLogprobs(-1.0, ())
    prompt = PromptLogprobs((SampledToken(1), SampledToken(2, scored), SampledToken(3, scored)))
    chunk = reply.prompt(0, prompt)
    assert chunk["text"] == "Hi!"
    assert chunk["logprobs"]["text_offset"] == [0, 0, 2]
