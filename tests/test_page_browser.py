"""The page in a headless Chromium, against a server with a fake engine."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import Gate, wait_until
from helpers_browser import NO_BROWSER, PHONE, Site, debug_request, debug_step, find_browser, open_site
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from mlxserve.config import ServerConfig
from mlxserve.errors import QueueFull

KEY = "sk-local-çé"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        path = find_browser(playwright)
        if path is None:
            pytest.skip(NO_BROWSER)
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def site(browser: Browser) -> Iterator[Site]:
    with open_site(browser) as site:
        yield site
        assert site.complaints == []


def ask(pane: Page | Locator, text: str) -> None:
    pane.get_by_label("Message", exact=True).fill(text)
    pane.get_by_label("Message", exact=True).press("Enter")


def answers(pane: Page | Locator) -> Locator:
    return pane.locator(".message.assistant")


def length(pane: Page | Locator) -> int:
    return len(answers(pane).last.locator(".body").inner_text())


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
        assert len(site.host.cancelled) == 1
        before = [length(panes.nth(0))]
        wait_until(lambda: length(panes.nth(0)) > before[0])

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


def fill_debug(site: Site) -> None:
    site.debug.requests = [
        debug_request("chatcmpl-000waits", "queued", front_end=0.02, queue=1.4),
        debug_request("chatcmpl-00prefil", "prefill", front_end=0.02, queue=0.3, prefill=0.8),
        debug_request("chatcmpl-0decodes", "decode", front_end=0.01, queue=0.1, prefill=0.4, decode=2.1, delivery=0.01),
        *(
            debug_request(
                f"chatcmpl-{n:03}done",
                "done",
                front_end=0.02,
                queue=0.1 * n,
                prefill=0.5,
                decode=3.0 - 0.2 * n,
                delivery=0.05,
            )
            for n in range(8)
        ),
    ]
    steps = [debug_step(n, rows=n % 7 + 1, prefill=128 if n % 11 == 0 else 0) for n in range(1, 121)]
    blocks = {"used": 90, "cached": 60, "max": 256}
    site.debug.models = [{"model": "fake", "num_running": 2, "num_waiting": 1, "blocks": blocks, "steps": steps}]
    site.debug.events = [
        {"time": 100.0, "kind": "received"},
        {"time": 100.02, "kind": "queued"},
        {"time": 101.4, "kind": "cache_hit", "num_tokens": 640},
        *({"time": 101.5 + n / 10, "kind": "token"} for n in range(5)),
    ]


class TestInside:
    def test_a_queued_request_is_shown_as_queued(self, site: Site) -> None:
        fill_debug(site)
        page = site.open("/#inside")
        row = page.locator('[data-request="chatcmpl-000waits"]')
        expect(row.locator(".state")).to_have_text("queued")
        expect(row.get_by_role("img", name="Front end 20 ms, Queue 1.40 s", exact=True)).to_be_visible()
        queue = row.locator(".part.queue").bounding_box()
        bar = row.locator(".bar").bounding_box()
        longest = max(request["total"] for request in site.debug.requests)
        assert queue is not None
        assert bar is not None
        assert queue["width"] / bar["width"] == pytest.approx(1.4 / longest, abs=0.01)
        site.debug.requests[0] = debug_request("chatcmpl-000waits", "prefill", front_end=0.02, queue=1.6, prefill=0.1)
        expect(row.locator(".state")).to_have_text("prefill")

    def test_numbers(self, site: Site) -> None:
        fill_debug(site)
        page = site.open("/#inside")
        tiles = page.locator(".tiles div")
        expect(tiles.nth(0)).to_have_text("Running2")
        expect(tiles.nth(1)).to_have_text("Waiting1")
        expect(page.get_by_role("img", name="90 used by requests, 60 cached, free to take, 106 free")).to_be_visible()
        expect(page.get_by_role("img", name="Time of each recent step").locator("rect.measured")).to_have_count(120)
        page.get_by_text("Last steps as a table").click()
        expect(page.get_by_label("Last steps").locator("tbody tr").first).to_contain_text("120")
        # Queue times of the 8 requests done: 0, 0.1 ... 0.7 s; by nearest rank the median is the fourth.
        latency = page.locator("section", has=page.get_by_role("heading", name="Latency")).locator("tbody tr").first
        expect(latency.locator("td")).to_have_text(["300 ms", "700 ms", "700 ms"])

    def test_a_request_opens(self, site: Site) -> None:
        fill_debug(site)
        page = site.open("/#inside")
        row = page.locator('[data-request="chatcmpl-003done"]')
        row.locator("summary").click()
        expect(row).to_contain_text("cache_hit")
        expect(row).to_contain_text("token \u00d7 5")
        polls = []
        page.on("response", lambda response: polls.append(response.url))
        wait_until(lambda: page.wait_for_timeout(50) or len(polls) > 3)
        expect(row.locator("details")).to_have_attribute("open", "")

    def test_without_debug_endpoints(self, site: Site) -> None:
        site.debug.is_there = False
        page = site.open("/#inside")
        expect(page.locator(".note")).to_contain_text("it has no /debug endpoints")
        page.get_by_role("link", name="Chat", exact=True).click()
        ask(page, "Hi")
        expect(answers(page)).to_contain_text("Hello, world!")

    def test_polls_only_while_it_is_shown(self, site: Site) -> None:
        page = site.open()
        asked = []
        page.on("request", lambda request: asked.append(request.url) if "/debug/" in request.url else None)
        page.wait_for_timeout(900)
        assert asked == []
        page.get_by_role("link", name="Inside").click()
        expect(page.get_by_text("No requests yet.")).to_be_visible()
        assert asked


CONTRAST = """(selector) => {
    const channels = (color) => {
        const canvas = new OffscreenCanvas(1, 1).getContext("2d");
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = ([r, g, b]) => [r, g, b]
        .map((value) => value / 255)
        .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const ground = (node) => {
        const color = getComputedStyle(node).backgroundColor;
        return channels(color)[3] === 255 ? color : ground(node.parentElement);
    };
    return [...document.querySelectorAll(selector)].filter((node) => node.checkVisibility()).map((node) => {
        const pair = [getComputedStyle(node).color, ground(node)].map((color) => luminance(channels(color)));
        return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    });
}"""
"""WCAG's contrast ratio of every element a selector finds, against the ground it stands on."""

TEXTS = (
    ".views a, .body p, .body li, .body td, .hint, .status, .code-head span, code, .primary, .chat-title, .state, "
    ".facts, dt, dd"
)


class TestLook:
    answer = (
        "### Finding primes\n\nThe *sieve of Eratosthenes* crosses out **multiples**, as in `range(2, n)`:\n\n"
        "```python\ndef primes(n: int) -> list[int]:\n    is_prime = [True] * n\n"
        "    for p in range(2, int(n**0.5) + 1):\n"
        "        if is_prime[p]:\n            is_prime[p * p :: p] = [False] * len(range(p * p, n, p))\n"
        "    return [p for p in range(2, n) if is_prime[p]]\n```\n\n1. Start with all numbers.\n2. Cross out:\n"
        "   - multiples of two,\n   - and so on.\n\n| n | primes below n |\n|---|---:|\n| 10 | 4 |\n| 100 | 25 |\n\n"
        "> See [Wikipedia](https://en.wikipedia.org/wiki/Sieve_of_Eratosthenes).\n"
    )

    @pytest.mark.slow
    @pytest.mark.parametrize("theme", ["light", "dark"])
    @pytest.mark.parametrize("width", ["desktop", "phone"])
    def test_screens(self, browser: Browser, tmp_path: Path, theme: str, width: str) -> None:
        options = {"color_scheme": theme}
        if width == "phone":
            options |= {"viewport": PHONE, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
        with open_site(browser, **options) as site:
            fill_debug(site)
            site.host.script.text = self.answer
            page = site.open()
            self.check(page, tmp_path / f"empty-{width}-{theme}.png")
            ask(page, "Write a Python function that finds the primes below n, and explain it.")
            expect(answers(page)).to_contain_text("First token")
            self.check(page, tmp_path / f"chat-{width}-{theme}.png")
            if width == "desktop":
                page.get_by_role("button", name="New chat beside").click()
                site.host.script.text, site.host.script.endless = "All work and no play. ", True
                ask(page.locator(".pane").nth(1), "Say something long.")
                wait_until(lambda: length(page.locator(".pane").nth(1)) > 300)
            else:
                page.get_by_role("button", name="Chats").tap()
            self.check(page, tmp_path / f"chats-{width}-{theme}.png")
            if width == "phone":
                page.keyboard.press("Escape")
            page.get_by_role("button", name="Parameters").first.click()
            self.check(page, tmp_path / f"parameters-{width}-{theme}.png")
            page.keyboard.press("Escape")
            page.get_by_role("link", name="Inside").click()
            expect(page.locator(".requests > li")).to_have_count(11)
            self.check(page, tmp_path / f"inside-{width}-{theme}.png")
            assert site.complaints == []

    def check(self, page: Page, path: Path) -> None:
        """Takes a picture, and holds that nothing is wider than the screen and all text can be read."""
        page.screenshot(path=path)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        wide = "(n) => n.checkVisibility() && n.scrollWidth > n.clientWidth + 1"
        boxes = page.locator("header, main, section, .card, .composer, .pane-head, dialog")
        assert boxes.evaluate_all(f"(all) => all.filter({wide}).map((n) => n.className)") == []
        ratios = page.evaluate(CONTRAST, TEXTS)
        assert ratios
        assert min(ratios) >= 4.5

    def test_theme_can_be_chosen(self, site: Site) -> None:
        page = site.open()
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        page.get_by_role("button", name="Dark theme").click()
        dark = page.evaluate(ground)
        assert dark != light
        page.reload()
        assert page.evaluate(ground) == dark
        page.get_by_role("button", name="Light theme").click()
        assert page.evaluate(ground) == light

    def test_everything_has_a_name(self, site: Site) -> None:
        fill_debug(site)
        page = site.open()
        ask(page, "Hi")
        expect(answers(page)).to_contain_text("First token")
        page.get_by_role("button", name="Parameters").click()
        snapshots = [page.locator("body").aria_snapshot()]
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Inside").click()
        expect(page.locator(".requests > li")).to_have_count(11)
        snapshots.append(page.locator("body").aria_snapshot())
        controls = re.compile(
            r"^\s*- (button|link|textbox|combobox|checkbox|spinbutton|img)(?: \[[^\]]*\])*:?$", re.MULTILINE
        )
        assert [controls.findall(snapshot) for snapshot in snapshots] == [[], []]

    def test_keyboard_alone(self, site: Site) -> None:
        page = site.open()
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.type("Hi")
        page.keyboard.press("Enter")
        expect(answers(page)).to_contain_text("First token")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Regenerate")).to_be_focused()
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
