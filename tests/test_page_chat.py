"""The page's chat in a headless Chromium, against a server with a fake engine."""

import json
from pathlib import Path

import pytest
from fake_engine import Gate, wait_until
from helpers_browser import Site, answers, ask, length, open_site
from playwright.sync_api import Browser, expect

from mlxserve.config import ServerConfig
from mlxserve.errors import QueueFull

KEY = "sk-local-çé"


class TestChat:
    def test_streams(self, site: Site) -> None:
        gate = site.host.script.first_token = Gate()
        site.host.script.num_cached_tokens = 3
        page = site.open()
        ask(page, "Hello?")
        expect(answers(page)).to_contain_text("Waiting for the first token")
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_hidden()
        gate.open()
        expect(answers(page)).to_contain_text("Hello, world!")
        # TIMINGS of the fake engine: 56 ms to the first token, 13 tokens in 0.5 s.
        expect(answers(page)).to_contain_text(
            "First token 56 ms · 24.0 tokens/s · 13 tokens · 3 of 6 prompt tokens cached"
        )
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()

    def test_text_shows_while_it_is_written(self, site: Site) -> None:
        site.host.script.endless = True
        page = site.open()
        ask(page, "Go on")
        wait_until(lambda: length(page) > 20)
        expect(answers(page)).to_have_attribute("data-state", "streaming")
        before = length(page)
        wait_until(lambda: length(page) > before)

    @pytest.mark.parametrize("how", ["button", "Escape"])
    def test_stop_ends_the_request(self, site: Site, how: str) -> None:
        site.host.script.endless = True
        page = site.open()
        ask(page, "Go on")
        wait_until(lambda: length(page) > 20)
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        expect(answers(page)).to_contain_text("Stopped.")
        wait_until(lambda: len(site.host.cancelled) == 1)
        assert length(page) > 20

    def test_stop_before_the_first_token(self, site: Site) -> None:
        site.host.script.tokenise = Gate()
        page = site.open()
        ask(page, "Go on")
        wait_until(lambda: site.host.requests)
        page.keyboard.press("Escape")
        expect(answers(page)).to_contain_text("Stopped.")
        wait_until(lambda: len(site.host.abandoned) == 1)

    def test_history_and_parameters_are_sent(self, site: Site) -> None:
        page = site.open()
        page.get_by_label("Model", exact=True).select_option("org/fake-4bit")
        page.get_by_role("button", name="Parameters").click()
        for label, value in {
            "System prompt": "Be brief.",
            "Temperature": "0.5",
            "Top p": "0.9",
            "Max tokens": "5",
        }.items():
            page.get_by_label(label).fill(value)
        page.get_by_label("Seed").fill("42")
        page.get_by_role("button", name="Save").click()
        ask(page, "One")
        expect(answers(page)).to_contain_text("Cut at the most tokens allowed.")
        ask(page, "Two")
        expect(answers(page)).to_have_count(2)
        wait_until(lambda: len(site.host.requests) == 2)
        request = site.host.requests[-1]
        contents = [(message["role"], message["content"]) for message in request.prompt.messages]
        assert contents == [("system", "Be brief."), ("user", "One"), ("assistant", "Hello"), ("user", "Two")]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.9, 5, 42)
        expect(answers(page).last).to_have_attribute("aria-label", "Answer of org/fake-4bit")

    def test_what_is_out_of_range_is_not_saved(self, site: Site) -> None:
        page = site.open()
        page.get_by_role("button", name="Parameters").click()
        page.get_by_label("Temperature").fill("3")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        ask(page, "Hi")
        expect(answers(page)).to_contain_text("Hello, world!")
        assert site.host.requests[0].sampling.temperature == 1

    def test_regenerate_asks_the_same_again(self, site: Site) -> None:
        page = site.open()
        ask(page, "Hi")
        expect(answers(page)).to_contain_text("Hello, world!")
        site.host.script.text = "Another one"
        page.get_by_role("button", name="Regenerate").click()
        expect(answers(page)).to_contain_text("Another one")
        expect(answers(page)).to_have_count(1)
        first, second = site.host.requests
        assert first.prompt == second.prompt

    def test_shift_enter_is_a_new_line(self, site: Site) -> None:
        page = site.open()
        field = page.get_by_label("Message", exact=True)
        field.press_sequentially("One")
        field.press("Shift+Enter")
        field.press_sequentially("Two")
        field.press("Enter")
        expect(page.locator(".message.user .body")).to_have_text("One\nTwo")
        wait_until(lambda: site.host.requests)
        assert site.host.requests[0].prompt.messages[0]["content"] == "One\nTwo"

    def test_refusals_and_failures_are_shown(self, site: Site) -> None:
        site.host.script.refusal = QueueFull("The queue is full.", retry_after=3)
        page = site.open()
        ask(page, "Hi")
        expect(answers(page)).to_contain_text("The queue is full.")
        site.host.reset()
        ask(page, "Again")
        expect(answers(page).last).to_contain_text("Hello, world!")
        # The question that got no answer is no part of what the model sees.
        assert [message["content"] for message in site.host.requests[0].prompt.messages] == ["Again"]
        site.host.script.failure = RuntimeError("hidden")
        ask(page, "And again")
        expect(answers(page).last).to_contain_text("The server failed while answering this request")

    def test_reload_keeps_chats(self, site: Site) -> None:
        page = site.open()
        ask(page, "The first one")
        expect(answers(page)).to_contain_text("Hello, world!")
        page.get_by_role("button", name="New chat", exact=True).click()
        site.host.script.endless = True
        ask(page, "The second one")
        wait_until(lambda: length(page) > 20)
        page.reload()
        expect(answers(page)).to_contain_text("Hello, world!Hello")
        expect(answers(page)).to_contain_text("Interrupted")
        wait_until(lambda: len(site.host.cancelled) == 1)
        page.get_by_role("button", name="The first one", exact=True).click()
        expect(answers(page)).to_contain_text("Hello, world!")
        expect(answers(page)).to_contain_text("First token 56 ms")

    def test_two_chats_stream_at_once(self, site: Site) -> None:
        site.host.script.endless = True
        page = site.open()
        ask(page, "One")
        page.get_by_role("button", name="New chat beside").click()
        panes = page.locator(".pane")
        expect(panes).to_have_count(2)
        ask(panes.nth(1), "Two")
        for pane in (panes.nth(0), panes.nth(1)):
            wait_until(lambda pane=pane: length(pane) > 20)
        before = [length(panes.nth(index)) for index in (0, 1)]
        wait_until(lambda: all(length(panes.nth(index)) > before[index] for index in (0, 1)))
        expect(page.get_by_label("streaming")).to_have_count(2)
        page.keyboard.press("Escape")
        expect(answers(panes.nth(1))).to_contain_text("Stopped.")
        wait_until(lambda: site.host.cancelled)
        before = [length(panes.nth(0))]
        wait_until(lambda: length(panes.nth(0)) > before[0])
        assert len(site.host.cancelled) == 1

    def test_one_question_for_all_panes(self, site: Site) -> None:
        page = site.open()
        page.get_by_role("button", name="New chat beside").click()
        panes = page.locator(".pane")
        panes.nth(1).get_by_label("Ask all panes").check()
        ask(panes.nth(1), "All of you")
        for index in (0, 1):
            expect(answers(panes.nth(index))).to_contain_text("Hello, world!")
        assert len(site.host.requests) == 2

    def test_streams_leave_a_connection_free(self, site: Site) -> None:
        site.host.script.first_token = Gate()
        page = site.open()
        page.evaluate(
            """async () => {
                const { streamChat } = await import("/page/api.js");
                window.ended = 0;
                const body = { model: "fake", messages: [{ role: "user", content: "Hi" }] };
                for (let i = 0; i < 8; i += 1) (async () => {
                    for await (const chunk of streamChat(body, new AbortController().signal)) void chunk;
                    window.ended += 1;
                })();
            }"""
        )
        wait_until(lambda: len(site.host.requests) == 5)
        assert page.evaluate("fetch('/v1/models').then((response) => response.status)") == 200
        assert len(site.host.requests) == 5
        site.host.script.first_token.open()
        wait_until(lambda: page.evaluate("window.ended") == 8)

    def test_the_log_follows_until_somebody_scrolls_up(self, site: Site) -> None:
        site.host.script.text, site.host.script.endless = "Line\n\n", True
        page = site.open()
        ask(page, "Go on")
        log = page.get_by_role("log")
        rest = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"
        wait_until(lambda: log.evaluate("(log) => log.scrollHeight > 2 * log.clientHeight"))
        assert log.evaluate(rest) < 48
        page.get_by_role("button", name="New chat beside").click()
        log = log.first
        wait_until(lambda: log.evaluate(rest) < 48)
        log.evaluate("(log) => (log.scrollTop = 10)")
        before = length(page.locator(".pane").first)
        wait_until(lambda: length(page.locator(".pane").first) > before + 100)
        assert log.evaluate("(log) => log.scrollTop") == 10

    def test_what_waits_in_the_browser_says_so(self, site: Site) -> None:
        site.host.script.first_token = Gate()
        page = site.open()
        for number in range(6):
            ask(page, f"Question {number}")
            expect(answers(page)).to_contain_text("Not sent yet" if number == 5 else "Waiting for the first token")
            page.get_by_role("button", name="New chat", exact=True).click()
        assert len(site.host.requests) == 5
        expect(page.get_by_label("streaming")).to_have_count(6)
        page.get_by_role("button", name="streaming Question 0").click()
        page.keyboard.press("Escape")
        wait_until(lambda: len(site.host.requests) == 6)

    def test_delete(self, site: Site) -> None:
        site.host.script.endless = True
        page = site.open()
        page.on("dialog", lambda dialog: dialog.accept())
        ask(page, "To be deleted")
        wait_until(lambda: length(page) > 20)
        page.get_by_role("button", name="Delete this chat").click()
        expect(page.get_by_text("To be deleted")).to_have_count(0)
        wait_until(lambda: len(site.host.cancelled) == 1)
        page.reload()
        expect(page.locator(".chat-open")).to_have_text(["New chat"])

    def test_export(self, site: Site) -> None:
        page = site.open()
        ask(page, "What's this?")
        expect(answers(page)).to_contain_text("First token")
        texts = {}
        for kind, name in (("Markdown", "What-s-this.md"), ("JSON", "What-s-this.json")):
            page.get_by_label("Export").click()
            with page.expect_download() as download:
                page.get_by_role("button", name=kind).click()
            assert download.value.suggested_filename == name
            texts[kind] = Path(download.value.path()).read_text(encoding="utf-8")
        assert (
            texts["Markdown"] == "# What's this?\n\nmodel: fake\n\n## You\n\nWhat's this?\n\n## fake\n\nHello, world!\n"
        )
        assert [message["content"] for message in json.loads(texts["JSON"])["messages"]] == [
            "What's this?",
            "Hello, world!",
        ]

    def test_storage_may_hold_anything(self, site: Site) -> None:
        page = site.open()
        page.evaluate(
            """() => {
                localStorage.setItem("mlxserve.chat.a", "{");
                localStorage.setItem("mlxserve.chat.b", "null");
                const messages = [{ role: "root", content: 1 }];
                localStorage.setItem("mlxserve.chat.c", JSON.stringify({ id: "c", created: 1, messages }));
                localStorage.setItem("mlxserve.panes", "7");
                localStorage.setItem("mlxserve.defaults", "[1]");
            }"""
        )
        page.reload()
        ask(page, "Hi")
        expect(answers(page)).to_contain_text("Hello, world!")
        expect(page.locator(".chat-open")).to_have_count(1)


class TestSecurity:
    def test_what_a_model_writes_stays_text(self, site: Site) -> None:
        evil = (
            "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>\n\n"
            "[link](javascript:document.title='broken') ![x](https://example.invalid/x.png) "
            '[data](data:text/html,<script>1</script>) <a href="javascript:1">a</a>\n\n'
            "```html\n<script>document.title='broken'</script>\n```\n\n"
            "| <b>a</b> | b |\n|---|---|\n| <svg onload=1> | [y](https://example.invalid/?a=1&b=2) |\n"
        )
        site.host.script.text = evil
        page = site.open()
        ask(page, "<b>Hi</b>")
        body = answers(page).locator(".body")
        expect(answers(page)).to_contain_text("First token")
        expect(page.locator(".message.user .body")).to_have_text("<b>Hi</b>")
        expect(body).to_contain_text("<img src=x onerror=")
        expect(body.locator("pre")).to_have_text("<script>document.title='broken'</script>")
        assert body.locator("img, script, svg:not(.icon), b").count() == 0
        hrefs = body.locator("a").evaluate_all("(links) => links.map((link) => link.href)")
        assert hrefs == ["https://example.invalid/x.png", "https://example.invalid/?a=1&b=2"]
        assert page.title() == "mlxserve"
        page.reload()
        expect(body.locator("pre")).to_have_text("<script>document.title='broken'</script>")
        assert page.title() == "mlxserve"

    def test_the_policy_is_in_force(self, site: Site) -> None:
        page = site.open()
        result = page.evaluate(
            """() => {
                try { document.body.innerHTML = "<p>x</p>"; return "taken"; } catch (error) { return error.name; }
            }"""
        )
        assert result == "TypeError"
        assert site.complaints
        site.complaints.clear()

    def test_key(self, browser: Browser) -> None:
        with open_site(browser, ServerConfig(api_key=KEY)) as site:
            page = site.open()
            dialog = page.get_by_role("dialog")
            dialog.get_by_label("Key", exact=True).fill("wrong")
            dialog.get_by_role("button", name="Use key").click()
            expect(dialog).to_contain_text("The server refused that key.")
            dialog.get_by_label("Key", exact=True).fill(KEY)
            dialog.get_by_label("Key", exact=True).press("Enter")
            expect(dialog).to_have_count(0)
            ask(page, "Hi")
            expect(answers(page)).to_contain_text("Hello, world!")
            assert page.evaluate("sessionStorage.getItem('mlxserve.key')") == KEY
            assert KEY not in page.evaluate("JSON.stringify(localStorage)")
            page.reload()
            expect(answers(page)).to_contain_text("Hello, world!")
            expect(dialog).to_have_count(0)
            assert site.complaints == []

    def test_a_declined_key_is_not_asked_for_again_and_again(self, browser: Browser) -> None:
        with open_site(browser, ServerConfig(api_key=KEY)) as site:
            page = site.open("/#inside")
            expect(page.get_by_role("dialog")).to_have_count(1)
            page.keyboard.press("Escape")
            expect(page.locator(".note")).to_have_text("This server needs an API key.")
            expect(page.get_by_role("dialog")).to_have_count(0)
            page.get_by_role("button", name="Try again").click()
            page.get_by_label("Key", exact=True).fill(KEY)
            page.get_by_role("button", name="Use key").click()
            expect(page.get_by_role("heading", name="Requests")).to_be_visible()
