"""How the page looks and what it is to a keyboard and a screen reader, in a headless Chromium."""

import re
from pathlib import Path

import pytest
from fake_engine import wait_until
from helpers_browser import PHONE, Site, answers, ask, fill_debug, length, open_site
from playwright.sync_api import Browser, Page, expect

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
    ".views a, .thinking summary, .thoughts p, .body p, .body li, .body td, .hint, .status, .code-head span, code, "
    ".primary, .chat-title, .state, .facts, dt, dd"
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
            site.host.script.text, site.host.script.reasoning = self.answer, "Primes, so:\n\n- the *sieve*."
            page = site.open()
            self.check(page, tmp_path / f"empty-{width}-{theme}.png")
            ask(page, "Write a Python function that finds the primes below n, and explain it.")
            expect(answers(page)).to_contain_text("First token")
            page.get_by_text("Thinking,").click()
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
