"""The page's inside view in a headless Chromium: debug endpoints that say what a test tells them to, and real ones."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_engine import wait_until
from helpers_browser import Site, answers, ask, debug_request, fill_debug
from helpers_engine import Gate, held
from helpers_http import serving
from helpers_served import FakeBuild
from playwright.sync_api import Browser, expect


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

    @pytest.mark.parametrize("width", [390, 800, 1280])
    def test_a_long_outcome_covers_nothing(self, site: Site, width: int) -> None:
        outcome = "ContextLengthExceeded"
        site.debug.requests.insert(0, debug_request("chatcmpl-0refused", "done", queue=0.1) | {"outcome": outcome})
        page = site.open("/#inside")
        page.set_viewport_size({"width": width, "height": 800})
        row = page.locator('[data-request="chatcmpl-0refused"]')
        expect(row.locator(".state")).to_have_attribute("title", outcome)
        # At one time: rows move while others come.
        ends, begins = row.evaluate(
            "row => [row.querySelector('.state').getBoundingClientRect().right,"
            " row.querySelector('.request-name').getBoundingClientRect().left]"
        )
        assert ends <= begins

    def test_numbers(self, site: Site) -> None:
        fill_debug(site)
        page = site.open("/#inside")
        tiles = page.locator(".tiles div")
        expect(tiles.nth(0)).to_have_text("Running2")
        expect(tiles.nth(1)).to_have_text("Waiting1")
        expect(
            page.get_by_role(
                "img", name="30 shared by several requests, 60 used by one request, 60 cached, free to take, 106 free"
            )
        ).to_be_visible()
        expect(page.get_by_role("img", name="Time of each recent step").locator("rect.measured")).to_have_count(120)
        page.get_by_text("Last steps as a table").click()
        expect(page.get_by_label("Last steps").locator("tbody tr").first).to_contain_text("120")
        # Queue times of the 8 requests done: 0, 0.1 ... 0.7 s; by nearest rank the median is the fourth.
        latency = page.locator("section", has=page.get_by_role("heading", name="Latency")).locator("tbody tr").first
        expect(latency.locator("td")).to_have_text(["300 ms", "700 ms", "700 ms"])

    def test_models_come_and_go(self, site: Site) -> None:
        fill_debug(site)
        (first,) = site.debug.models
        idle = {
            "num_running": 0,
            "num_waiting": 0,
            "blocks": {"used": 0, "shared": 0, "cached": 0, "max": 0},
            "steps": [],
        }
        site.debug.models.append({"model": "other", **idle})
        page = site.open("/#inside")
        cards = page.locator(".model-card h2")
        expect(cards).to_have_text(["fake", "other"])
        none = page.get_by_text("No model is loaded.")
        expect(none).to_be_hidden()
        # One went and one came between the two questions of a poll: requests of both are listed all the same.
        embedding = debug_request("embd-0embedding", "done", queue=0.1, prefill=0.2)
        embedding |= {"model": "third", "ttft": None, "num_generated_tokens": 0}
        site.debug.requests.insert(0, embedding)
        site.debug.models = [{"model": "third", **idle}, {"model": "other", **idle}]
        expect(cards).to_have_text(["other", "third"])
        row = page.locator('[data-request="embd-0embedding"]')
        expect(row.locator(".state")).to_have_text("stop")
        expect(row.locator(".facts")).to_have_text("third · 300 ms · 700 tokens · 640 cached")
        expect(page.locator('[data-request="chatcmpl-003done"] .facts')).to_contain_text("fake · ")
        # The times of what gave no token are no answers' times.
        expect(page.get_by_text("of the last 8 requests that were answered", exact=True)).to_be_visible()
        site.debug.models = []
        expect(cards).to_have_count(0)
        expect(none).to_be_visible()
        site.debug.models = [first]
        expect(cards).to_have_text(["fake"])
        expect(page.get_by_role("img", name="Time of each recent step").locator("rect.measured")).to_have_count(120)

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


def test_a_real_engine(browser: Browser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One request computes, one waits for it, one is done, as the engine's own /debug tells it."""
    build = FakeBuild(monkeypatch)
    with serving(build, tmp_path, max_num_seqs=1) as server, held(Gate()) as gate:
        ended = server.complete("the log", max_tokens=1).json()["id"]
        server.runner.before_step = gate
        with ThreadPoolExecutor(2) as executor:
            futures = [executor.submit(server.complete, max_tokens=5)]
            gate.wait()
            futures.append(executor.submit(server.complete, "another", max_tokens=2))
            wait_until(lambda: len(server.traces()) == 3 and server.traces()[1]["state"] == "queued")
            gate.let_go()
            gate.wait()
            computing, waiting, done = server.traces()
            assert done["id"] == ended
            page = browser.new_page()
            complaints: list[str] = []
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(f"{server.address}/#inside")
            for trace, state in ((computing, "decode"), (waiting, "queued"), (done, "length")):
                row = page.locator(f'[data-request="{trace["id"]}"]')
                expect(row.locator(".state")).to_have_text(state)
            card = page.get_by_label("Engine of one")
            expect(card.locator(".tiles div").first).to_have_text("Running1")
            expect(card.get_by_role("img", name="used by one request")).to_be_visible()
            gate.open()
            for future in futures:
                assert future.result().status_code == 200
            expect(page.locator('[data-request] .state:text-is("length")')).to_have_count(3)
            page.close()
            assert complaints == []
