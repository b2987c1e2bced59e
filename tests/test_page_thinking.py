"""A model's thoughts on the page: shown as they come, kept, sent back as what they are, and asked for or not."""

import re
from pathlib import Path

import pytest
from fake_engine import Gate, wait_until
from helpers_browser import Site, answers, ask
from playwright.sync_api import Page, expect

from mlxserve.core.generation import Reasoning
from mlxserve.errors import InvalidParameter

THOUGHTS = "They *greet*.\n\nSo do I."


def choose(page: Page, thinking: str) -> None:
    page.get_by_role("button", name="Parameters").click()
    page.get_by_label("Thinking", exact=True).select_option(label=thinking)
    page.get_by_role("button", name="Save").click()


def test_thoughts_are_open_until_the_answer_begins(site: Site) -> None:
    gate = Gate()
    site.host.script.reasoning, site.host.script.thought = THOUGHTS, gate
    page = site.open()
    ask(page, "Hello?")
    thinking = answers(page).locator("details")
    expect(thinking).to_have_attribute("open", "")
    expect(thinking.locator("summary")).to_have_text("Thinking…")
    expect(thinking.locator("p")).to_have_text(["They greet.", "So do I."])
    expect(answers(page).locator(".body")).to_be_empty()
    expect(answers(page).locator(".status")).to_have_text("Thinking…")
    gate.open()
    expect(answers(page).locator(".body")).to_have_text("Hello, world!")
    expect(thinking).not_to_have_attribute("open", "")
    expect(thinking.locator("summary")).to_have_text(re.compile(r"^Thinking, [\d.]+ (ms|s)$"))
    told = thinking.locator("summary").inner_text()
    page.reload()
    expect(thinking.locator("summary")).to_have_text(told)
    expect(thinking).not_to_have_attribute("open", "")
    thinking.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(thinking.locator("p").last).to_be_visible()


def test_thoughts_are_exported_and_sent_back_as_thoughts(site: Site) -> None:
    site.host.script.reasoning = THOUGHTS
    page = site.open()
    ask(page, "Hi")
    expect(answers(page)).to_contain_text("First token")
    page.get_by_label("Export").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Markdown").click()
    exported = Path(download.value.path()).read_text(encoding="utf-8")
    assert "## fake\n\n> **Thinking**\n>\n> They *greet*.\n>\n> So do I.\n\nHello, world!\n" in exported
    ask(page, "And again")
    expect(answers(page)).to_have_count(2)
    wait_until(lambda: len(site.host.requests) == 2)
    assert site.host.requests[1].prompt.messages == (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, world!", "reasoning_content": THOUGHTS},
        {"role": "user", "content": "And again"},
    )


def test_thoughts_that_were_cut_off_stay_open(site: Site) -> None:
    site.host.script.reasoning, site.host.script.text, site.host.script.endless = "Hm. ", "", True
    page = site.open()
    ask(page, "Think")
    expect(answers(page).locator(".thoughts")).to_contain_text("Hm. Hm.")
    page.keyboard.press("Escape")
    expect(answers(page).locator(".status")).to_have_text("Stopped.")
    page.reload()
    expect(answers(page).locator(".thoughts")).to_be_visible()
    site.host.reset()
    ask(page, "Never mind")
    expect(answers(page).last).to_contain_text("Hello, world!")
    assert [message["content"] for message in site.host.requests[-1].prompt.messages] == ["Never mind"]


@pytest.mark.parametrize(
    ("thinking", "reasoning", "template_kwargs"),
    [
        ("off", Reasoning(enabled=False), {}),
        ("on", Reasoning(enabled=True, param="chat_template_kwargs"), {"enable_thinking": True}),
        ("low", Reasoning(enabled=True, effort="low"), {}),
    ],
)
def test_how_much_to_think_is_asked_for(
    site: Site, thinking: str, reasoning: Reasoning, template_kwargs: dict[str, bool]
) -> None:
    page = site.open()
    choose(page, thinking)
    page.reload()
    ask(page, "Hi")
    expect(answers(page)).to_contain_text("Hello, world!")
    choose(page, "the model's default")
    ask(page, "Hi")
    expect(answers(page).last).to_contain_text("Hello, world!")
    first, second = (request.prompt for request in site.host.requests)
    assert (first.reasoning, first.template_kwargs) == (reasoning, template_kwargs)
    assert (second.reasoning.enabled, second.template_kwargs) == (None, {})


def test_a_refusal_to_think_is_shown(site: Site) -> None:
    site.host.script.refusal = InvalidParameter("This model does not think; leave it out.", param="reasoning_effort")
    page = site.open()
    choose(page, "high")
    ask(page, "Hi")
    expect(answers(page).locator(".status")).to_have_text("This model does not think; leave it out.")
