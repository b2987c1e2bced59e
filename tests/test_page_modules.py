"""Modules of the page on their own, in a headless Chromium: Markdown, server-sent events, numbers."""

from collections.abc import Iterator
from typing import Any

import pytest
from helpers_browser import open_site
from playwright.sync_api import Browser, Page

RENDER = """async (steps) => {
    const { renderMarkdown } = await import("/page/markdown.js");
    const node = document.createElement("div");
    for (const text of steps) renderMarkdown(node, text);
    for (const each of node.querySelectorAll(".code-head")) each.remove();
    for (const each of node.querySelectorAll("a")) ["target", "rel"].forEach((name) => each.removeAttribute(name));
    for (const each of node.querySelectorAll("[tabindex]")) each.removeAttribute("tabindex");
    return node.innerHTML;
}"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    with open_site(browser) as site:
        yield site.open()


def render(page: Page, *texts: str) -> str:
    """The HTML of the last text, after the ones before it have been shown in the same place."""
    return page.evaluate(RENDER, list(texts))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", "<p>Hello</p>"),
        ("a\nb\n\nc", "<p>a<br>b</p><p>c</p>"),
        ("# One\n###### Six\n#no", "<h3>One</h3><h6>Six</h6><p>#no</p>"),
        ("*a* _b_ **c** __d__ ~~e~~", "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> <s>e</s></p>"),
        ("***both*** **a *b* c**", "<p><strong><em>both</em></strong> <strong>a <em>b</em> c</strong></p>"),
        ("snake_case_name 2 * 3 * 4 \\*no\\*", "<p>snake_case_name 2 * 3 * 4 *no*</p>"),
        ("**open and `co**de`", "<p>**open and <code>co**de</code></p>"),
        ("``a ` b`` `<b>`", "<p><code>a ` b</code> <code>&lt;b&gt;</code></p>"),
        (
            "- a\n- b\n  - c\n    1. d\n- e",
            "<ul><li>a</li><li>b<ul><li>c<ol><li>d</li></ol></li></ul></li><li>e</li></ul>",
        ),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("1. a\n\n   more\n\n2. b", "<ol><li><p>a</p><p>more</p></li><li>b</li></ol>"),
        ("- a\n\ntext", "<ul><li>a</li></ul><p>text</p>"),
        ("* a\n\t* b", "<ul><li>a<ul><li>b</li></ul></li></ul>"),
        ("> a\n> - b", "<blockquote>a<ul><li>b</li></ul></blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("```py\n\tx < 1\n\n# y\n```\nz", '<div class="code"><pre><code>\tx &lt; 1\n\n# y</code></pre></div><p>z</p>'),
        ("~~~\n```\n~~~", '<div class="code"><pre><code>```</code></pre></div>'),
        ("```\nnot closed", '<div class="code"><pre><code>not closed</code></pre></div>'),
        ("[a](https://x.org/b_(c))", '<p><a href="https://x.org/b_(c)">a</a></p>'),
        ("See https://x.org/a_b_c.", '<p>See <a href="https://x.org/a_b_c">https://x.org/a_b_c</a>.</p>'),
        ("<https://x.org>", '<p><a href="https://x.org/">https://x.org</a></p>'),
        ("![cat](https://x.org/c.png)", '<p><a href="https://x.org/c.png">cat</a></p>'),
        ("a < b && c > d &amp; <br>", "<p>a &lt; b &amp;&amp; c &gt; d &amp;amp; &lt;br&gt;</p>"),
        ("", ""),
    ],
)
def test_markdown(page: Page, text: str, expected: str) -> None:
    assert render(page, text) == expected
    assert render(page, *(text[:end] for end in range(len(text) + 1))) == expected


def test_table(page: Page) -> None:
    expected = (
        '<div class="table" role="group" aria-label="Table"><table><thead><tr><th class="left">a</th>'
        '<th class="right">b</th></tr></thead><tbody><tr><td class="left">1 | 2</td><td class="right"></td></tr>'
        "</tbody></table></div><p>c</p>"
    )
    assert render(page, "| a | b |\n|---|--:|\n| 1 \\| 2 |\n\nc") == expected


@pytest.mark.parametrize(
    "target",
    [
        *("javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\\script:alert(1)", "&#106;avascript:alert(1)"),
        *(
            "data:text/html,x",
            "vbscript:x",
            "file:///etc/passwd",
            "blob:x",
            "/relative",
            "//x.org",
            "",
            "<javascript:1>",
        ),
    ],
)
def test_unsafe_links_are_no_links(page: Page, target: str) -> None:
    assert "<a" not in render(page, f"[a]({target})")


def test_finished_blocks_stay_while_a_text_grows(page: Page) -> None:
    kept = page.evaluate(
        """async () => {
            const { renderMarkdown } = await import("/page/markdown.js");
            const node = document.createElement("div");
            renderMarkdown(node, "One\\n\\n```\\na");
            const [first, code] = node.children;
            renderMarkdown(node, "One\\n\\n```\\na\\nb\\n```\\n\\nTwo");
            return [node.children[0] === first, node.children[1] === code, code.querySelector("code").textContent];
        }"""
    )
    assert kept == [True, True, "a\nb"]


@pytest.mark.parametrize(
    "text",
    [
        *("*a ", "**a ", "_a ", "`", "``a` ", "[", "[a](", "![", "<", "h", "http://", "~~a ", "***"),
        *("\n", "- \n", "\n- a\n", "> ", "> > ", "- - ", "|", "|-", "#", "```\n", "\t", "\\", " "),
    ],
)
def test_hostile_repetitions_are_rendered(page: Page, text: str) -> None:
    """Quadratic work would take minutes here, and the test's time be up."""
    page.evaluate(RENDER, ["x " + text * (60_000 // len(text))])


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (["data: a\n\ndata: b\n\n"], ["a", "b"]),
        (["da", "ta: a", "\n", "\n"], ["a"]),
        (["data: a\r", "\n\r\n"], ["a"]),
        ([": keep-alive\n\ndata:a\ndata: b\n\nevent: x\n\n"], ["a\nb"]),
        (["data: cut"], []),
    ],
)
def test_server_sent_events(page: Page, chunks: list[str], expected: list[str]) -> None:
    events = page.evaluate(
        """async (chunks) => {
            const { serverSentEvents } = await import("/page/api.js");
            const encoder = new TextEncoder();
            const stream = new ReadableStream({
                start(controller) {
                    for (const chunk of chunks) controller.enqueue(encoder.encode(chunk));
                    controller.close();
                },
            });
            const events = [];
            for await (const data of serverSentEvents(stream)) events.push(data);
            return events;
        }""",
        chunks,
    )
    assert events == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        *(("seconds(0)", "0.0 ms"), ("seconds(0.0004)", "0.4 ms"), ("seconds(0.00999)", "10 ms")),
        *(("seconds(0.9996)", "1.00 s"), ("seconds(12.34)", "12.3 s"), ("seconds(59.96)", "1 min 0 s")),
        *(("seconds(null)", "–"), ("seconds(NaN)", "–"), ("rate(0.5)", "0.50"), ("rate(126.4)", "126")),  # noqa: RUF001
        *(("count(1, 'token')", "1 token"), ("count(1024, 'token')", "1,024 tokens")),
        *(("percentile([], 50)", None), ("percentile([1, 2, 3, 4], 50)", 2), ("percentile([1, 2], 99)", 2)),
    ],
)
def test_numbers(page: Page, call: str, expected: Any) -> None:
    assert page.evaluate(f"import('/page/format.js').then(({{ {call.partition('(')[0]} }}) => {call})") == expected
