"""Chat templates and the way from a prompt to token ids."""

import pytest
import tiny_tokenizers

from mlxserve.core.generation import ChatPrompt, TextPrompt, TokenPrompt
from mlxserve.errors import ContextLengthExceeded, InvalidParameter
from mlxserve.text.chat_template import encode_prompt, render
from mlxserve.text.tokenizer import Tokenizer

CHATML = """{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if not loop.last or add_generation_prompt %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
USER = {"role": "user", "content": "the cat"}


def tokenizer_with(template: str | None) -> Tokenizer:
    hf_tokenizer = tiny_tokenizers.byte_level()
    hf_tokenizer.chat_template = template
    return Tokenizer(hf_tokenizer, frozenset({1}))


def test_render_ends_where_the_answer_begins():
    text = render(tokenizer_with(CHATML), ChatPrompt((USER,)))
    assert text == "<s><|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"


def test_a_begun_answer_stays_open():
    messages = (USER, {"role": "assistant", "content": "sat on"})
    text = render(tokenizer_with(CHATML), ChatPrompt(messages))
    assert text == "<s><|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat on"
    assert messages[1] == {"role": "assistant", "content": "sat on"}


@pytest.mark.parametrize(
    "last",
    [{"role": "assistant", "content": ""}, {"role": "assistant", "content": "x", "tool_calls": [{"function": {}}]}],
    ids=["empty", "tool call"],
)
def test_an_assistant_message_that_is_not_a_begun_answer_is_followed_by_a_new_turn(last):
    assert render(tokenizer_with(CHATML), ChatPrompt((USER, last))).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_tools_and_template_arguments_reach_the_template():
    template = "{{ tools | tojson if tools else 'no tools' }} {{ enable_thinking }} {{ documents | length }}"
    tool = {"type": "function", "function": {"name": "clock"}}
    arguments = {"enable_thinking": False, "documents": [{"title": "a", "text": "b"}]}
    prompt = ChatPrompt((USER,), tools=(tool,), template_kwargs=arguments)
    assert render(tokenizer_with(template), prompt) == ('[{"type": "function", "function": {"name": "clock"}}] False 1')
    assert render(tokenizer_with("{{ tools is none }}"), ChatPrompt((USER,))) == "True"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.missing }}", "has no element 7"),
        ("{{ 'x' + messages[0].number }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ raise_exception('long' * 1000) }}", r"\.\.\.$"),
        (None, "no chat template"),
    ],
)
def test_template_errors_are_the_messages_fault(template, message):
    with pytest.raises(InvalidParameter, match=message) as caught:
        render(tokenizer_with(template), ChatPrompt(({**USER, "number": 3},)))
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 600


def test_no_messages_are_refused():
    with pytest.raises(InvalidParameter, match="at least one message") as caught:
        render(tokenizer_with(CHATML), ChatPrompt(()))
    assert caught.value.param == "messages"


def test_a_begun_answer_that_the_template_drops_is_refused():
    template = "{% for message in messages %}{{ message.content.split('</think>')[-1][:2] }}{% endfor %}"
    with pytest.raises(InvalidParameter, match="final message"):
        render(tokenizer_with(template), ChatPrompt((USER, {"role": "assistant", "content": "begun"})))


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "add_generation_prompt", "tools", "messages", "conversation", "conversations"]
)
def test_template_arguments_cannot_replace_what_is_not_the_clients(name):
    with pytest.raises(InvalidParameter, match=name) as caught:
        render(tokenizer_with(CHATML), ChatPrompt((USER,), template_kwargs={name: "{{ 1 }}"}))
    assert caught.value.param == "chat_template_kwargs"


def test_a_chat_gets_only_the_special_tokens_of_its_template():
    tokenizer = tokenizer_with(CHATML)
    ids = encode_prompt(tokenizer, ChatPrompt((USER,)))
    bos = tokenizer.hf_tokenizer.bos_token_id
    assert ids.count(bos) == 1
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == render(tokenizer, ChatPrompt((USER,)))


def test_plain_text_gets_the_tokenizers_special_tokens():
    tokenizer = tokenizer_with(None)
    bos = tokenizer.hf_tokenizer.bos_token_id
    assert encode_prompt(tokenizer, TextPrompt("the cat")) == [
        bos,
        *tokenizer.encode("the cat", add_special_tokens=False),
    ]


def test_token_ids_pass_as_they_are():
    tokenizer = tokenizer_with(None)
    assert encode_prompt(tokenizer, TokenPrompt((5, 0, tokenizer.vocab_size - 1))) == [5, 0, tokenizer.vocab_size - 1]


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**70])
def test_token_ids_outside_of_the_vocabulary_are_refused(token_id):
    with pytest.raises(InvalidParameter, match=f"token 1 of the prompt is {token_id};") as caught:
        encode_prompt(tokenizer_with(None), TokenPrompt((5, token_id)))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "param"), [(TokenPrompt(()), "prompt"), (TextPrompt(""), "prompt"), (ChatPrompt((USER,)), "messages")]
)
def test_an_empty_prompt_is_refused(prompt, param):
    hf_tokenizer = tiny_tokenizers.byte_level()
    hf_tokenizer.backend_tokenizer.post_processor = None
    hf_tokenizer.chat_template = "{# nothing #}"
    with pytest.raises(InvalidParameter, match="empty") as caught:
        encode_prompt(Tokenizer(hf_tokenizer, frozenset()), prompt)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(TextPrompt("a\ud83d"), "prompt"), (ChatPrompt(({"role": "user", "content": "a\ud83d"},)), "messages")],
)
def test_half_a_surrogate_pair_is_refused(prompt, param):
    with pytest.raises(InvalidParameter, match="surrogate pair") as caught:
        encode_prompt(tokenizer_with(CHATML), prompt)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(TextPrompt("x" * 10_000), "prompt"), (ChatPrompt(({"role": "user", "content": "x" * 10_000},)), "messages")],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch, prompt, param):
    tokenizer = tokenizer_with(CHATML)

    def encode(text, *, add_special_tokens):
        raise AssertionError("tokenised")

    monkeypatch.setattr(tokenizer, "encode", encode)
    with pytest.raises(ContextLengthExceeded, match="at least") as caught:
        encode_prompt(tokenizer, prompt, 100)
    assert caught.value.param == param
    assert caught.value.limit == 100
    assert 100 <= caught.value.num_tokens <= 10_000


def test_a_text_that_may_fit_is_tokenised():
    assert len(encode_prompt(tokenizer_with(None), TextPrompt("x" * 100), 100)) == 101


def test_a_context_stands_before_the_messages_and_the_sequence_begins_once():
    tokenizer = tokenizer_with(CHATML)
    context = encode_prompt(tokenizer, ChatPrompt((USER,)))
    begun, *rest = encode_prompt(tokenizer, ChatPrompt((USER,)))
    assert begun == tokenizer.hf_tokenizer.bos_token_id
    assert encode_prompt(tokenizer, ChatPrompt((USER,), context=tuple(context))) == [*context, *rest]


def test_a_token_that_begins_every_turn_stays_behind_a_context():
    turns = "{% for message in messages %}{{ bos_token }}{{ message.content }}{% endfor %}{{ bos_token }}"
    tokenizer = tokenizer_with(turns)
    ids = encode_prompt(tokenizer, ChatPrompt((USER,)))
    assert encode_prompt(tokenizer, ChatPrompt((USER,), context=(5,))) == [5, *ids]


def test_tokens_of_a_context_are_checked():
    tokenizer = tokenizer_with(CHATML)
    with pytest.raises(InvalidParameter, match="token 1 of the context") as error:
        encode_prompt(tokenizer, ChatPrompt((USER,), context=(5, tokenizer.vocab_size)))
    assert error.value.param == "context"
