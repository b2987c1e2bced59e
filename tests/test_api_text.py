"""/tokenize, /detokenize and /apply-template: over HTTP on the fake engine, and on real tokenizers without HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import pytest
import tiny_tokenizers
from fake_engine import FakeHost, Gate, wait_until
from test_api_disconnect import Caller
from test_api_errors import error_of

from mlxserve.core.generation import ChatPrompt
from mlxserve.engine.text_service import TextService
from mlxserve.errors import InvalidParameter
from mlxserve.text.tokenizer import Tokenizer

T = TypeVar("T")
USER = {"role": "user", "content": "Hi"}
KINDS = {
    "byte_level": tiny_tokenizers.byte_level,
    "llama": tiny_tokenizers.sentencepiece,
    "gemma": lambda: tiny_tokenizers.sentencepiece(strip=False),
}


def post(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    return http.post(path, json={"model": "fake", **fields})


@pytest.mark.parametrize("prefix", ["", "/v1"])
class TestEndpoints:
    def test_tokenize(self, host: FakeHost, http: httpx.Client, prefix: str) -> None:
        expected = {"tokens": [72, 105], "count": 2, "max_model_len": 4096}
        assert post(http, prefix + "/tokenize", content="Hi").json() == expected
        assert post(http, prefix + "/tokenize", text="Hi").json() == expected

    def test_detokenize(self, host: FakeHost, http: httpx.Client, prefix: str) -> None:
        assert post(http, prefix + "/detokenize", tokens=[72, 105]).json() == {"content": "Hi", "prompt": "Hi"}
        assert post(http, prefix + "/detokenize", tokens=[]).json() == {"content": "", "prompt": ""}

    def test_apply_template(self, host: FakeHost, http: httpx.Client, prefix: str) -> None:
        assert post(http, prefix + "/apply-template", messages=[USER]).json() == {"prompt": "<user>Hi"}


@pytest.mark.parametrize(
    ("fields", "special"),
    [
        ({"content": ""}, False),
        ({"text": ""}, False),
        ({"prompt": ""}, True),
        ({"content": "", "add_special": True}, True),
        ({"prompt": "", "add_special_tokens": False}, False),
        ({"prompt": "", "add_special": False, "add_special_tokens": False}, False),
    ],
)
def test_special_tokens(host: FakeHost, http: httpx.Client, fields: dict[str, Any], special: bool) -> None:
    assert post(http, "/tokenize", **fields).json()["tokens"] == [0] * special


def test_pieces(host: FakeHost, http: httpx.Client) -> None:
    reply = post(http, "/tokenize", content="aé", with_pieces=True, return_token_strs=True).json()
    assert reply["tokens"] == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert (reply["count"], reply["token_strs"]) == (3, ["a", "bytes:\\xc3", "bytes:\\xa9"])


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        ("/tokenize", {}, "content", "missing_required_parameter"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "prompt", "invalid_value"),
        ("/tokenize", {"content": ["a"]}, "content", "invalid_type"),
        ("/tokenize", {"content": "x" * 4_000_001}, "content", "invalid_value"),
        (
            *("/tokenize", {"prompt": "a", "add_special": True, "add_special_tokens": False}),
            *("add_special_tokens", "invalid_value"),
        ),
        ("/tokenize", {"content": "a", "parse_special": True}, "parse_special", "unknown_parameter"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": "Hi"}, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]", "invalid_value"),
        ("/detokenize", {"tokens": [1, 1.5]}, "tokens[1]", "invalid_type"),
        ("/apply-template", {"messages": []}, "messages", "invalid_value"),
        ("/apply-template", {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ("/apply-template", {"messages": [USER], "tools": [{}]}, "tools[0].type", "missing_required_parameter"),
        ("/apply-template", {"messages": [USER], "stream": True}, "stream", "unknown_parameter"),
    ],
)
def test_wrong_fields_are_named(
    host: FakeHost, http: httpx.Client, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    error = error_of(post(http, path, **fields), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert host.leases == []


@pytest.mark.parametrize("path", ["/tokenize", "/v1/detokenize", "/apply-template"])
def test_models_and_leases(host: FakeHost, http: httpx.Client, path: str) -> None:
    fields: dict[str, Any] = {"tokens": [1]} if "detok" in path else {"content": "a"}
    fields = {"messages": [USER]} if "apply" in path else fields
    assert post(http, path, **fields).status_code == 200
    assert error_of(post(http, path, **fields, model="nobody"), 404)["code"] == "model_not_found"
    assert http.get(path).status_code == 405
    assert (host.keep_alives, host.leases) == ([None, None], [])


def test_a_client_that_goes_away_is_not_waited_for(host: FakeHost, address: str) -> None:
    host.script.load = gate = Gate()
    with Caller(address, "/apply-template"):
        wait_until(lambda: gate.num_waiting)
    wait_until(lambda: host.abandoned == ["fake"])


def ask(kind: str, question: Callable[[TextService], Awaitable[T]], template: str | None = None) -> T:
    async def run() -> T:
        tokenizer = KINDS[kind]()
        tokenizer.chat_template = template
        with ThreadPoolExecutor(1) as executor:
            return await question(TextService(Tokenizer(tokenizer, frozenset({1})), executor))

    return asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["the cat sat", " the cat", "größer 日本 🎉\n\n  x", ""])
def test_there_and_back(kind: str, text: str) -> None:
    async def both(texts: TextService) -> str:
        return await texts.detokenize(await texts.tokenize(text, add_special_tokens=False, param="content"))

    assert ask(kind, both) == text


def test_control_tokens_are_written_out() -> None:
    async def both(texts: TextService) -> str:
        return await texts.detokenize(await texts.tokenize("the<|im_end|>", add_special_tokens=True, param="prompt"))

    assert ask("byte_level", both) == "<s>the<|im_end|>"


def test_half_a_character() -> None:
    with pytest.raises(InvalidParameter, match="surrogate") as caught:
        ask("byte_level", lambda texts: texts.tokenize("a\ud83d", add_special_tokens=False, param="text"))
    assert caught.value.param == "text"


def test_tokens_that_the_model_does_not_have() -> None:
    with pytest.raises(InvalidParameter, match="token 1 is 5000000") as caught:
        ask("byte_level", lambda texts: texts.detokenize([5, 5_000_000]))
    assert caught.value.param == "tokens[1]"


def test_render() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | length if tools else 0 }}"
    prompt = ChatPrompt((USER,), tools=({"type": "function", "function": {"name": "f"}},))
    assert ask("byte_level", lambda texts: texts.render(prompt), template) == "[user]Hi1"
    with pytest.raises(InvalidParameter, match="no chat template"):
        ask("byte_level", lambda texts: texts.render(prompt))
