"""What answers look like: words that are not broken, Markdown that grows, thoughts, and files in a prompt."""

import asyncio
import io
import itertools
import os
import random
import sys
from pathlib import Path

import pytest
import typer
from fake_cli import FakeBackend
from rich.console import Console
from rich.markdown import Markdown

from mlxserve.cli import console, markdown_view
from mlxserve.cli.answer import Answer, show_answer
from mlxserve.cli.answer_view import Style
from mlxserve.cli.attachment import read_attachment
from mlxserve.cli.markdown_view import MarkdownBody, blocks, split_growing
from mlxserve.cli.parameters import ChatParameters
from mlxserve.cli.word_wrap import WordWrapper
from mlxserve.errors import InvalidParameter


def wrap(text: str, width: int, cuts: tuple[int, ...] = ()) -> str:
    wrapper = WordWrapper(lambda: width)
    places = [0, *sorted(cuts), len(text)]
    return "".join(wrapper.push(text[a:b]) for a, b in itertools.pairwise(places)) + wrapper.finish()


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("one two three", "one two \nthree"),
        ("exactly 8 it", "exactly \n8 it"),
        ("12345678 9", "12345678\n9"),
        ("no\nbreak\n\n  kept", "no\nbreak\n\n  kept"),
        ("a incomprehensible b", "a \nincomprehensible\nb"),
        ("日本語の文字列", "日本語の\n文字列"),
        ("    deep indent", "    deep\nindent"),
        ("", ""),
    ],
)
def test_lines_break_at_words(text: str, wrapped: str) -> None:
    assert wrap(text, 8) == wrapped


def test_breaks_do_not_depend_on_the_pieces_that_come() -> None:
    seed = int(os.environ.get("MLXSERVE_TEST_SEED") or random.randrange(2**32))
    print(f"MLXSERVE_TEST_SEED={seed}")
    source = random.Random(seed)
    for _ in range(200):
        text = "".join(source.choices("ab \n字", weights=[8, 8, 4, 1, 2], k=60))
        cuts = tuple(source.sample(range(60), 5))
        whole = wrap(text, 10)
        assert wrap(text, 10, cuts) == whole
        assert [c for c in whole if not c.isspace()] == [c for c in text if not c.isspace()]


DOCUMENT = """\
# Title
Some *text*
and more.

- one

  inside one
- two

```python
print("a")


print("b")
```
| a | b |
|---|---|
| 1 | 2 |

[a link](https://example.org)
"""
RENDERED = """\
Title

Some text
and more.

 • one
   inside one
 • two

 print("a")


 print("b")

 a  b
 ────
 1  2

a link (https://example.org)
"""


@pytest.fixture
def plain_console(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What Markdown is written to: a file of 40 columns."""
    written = io.StringIO()
    monkeypatch.setattr(markdown_view, "open_rich", lambda **options: Console(file=written, width=40, **options))
    return written


@pytest.mark.parametrize("size", [1, 7, len(DOCUMENT)])
def test_markdown_does_not_depend_on_the_pieces_that_come(plain_console: io.StringIO, size: int) -> None:
    body = MarkdownBody()
    for start in range(0, len(DOCUMENT), size):
        body.push(DOCUMENT[start : start + size])
    body.finish()
    assert plain_console.getvalue() == RENDERED
    assert body.at_line_start


def test_markdown_cannot_steer_the_terminal(plain_console: io.StringIO) -> None:
    body = MarkdownBody()
    body.push("a\x1b[2Jb\x9b1m [bold]c[/bold] :smile:\n")
    body.finish()
    assert plain_console.getvalue() == "a[2Jb1m [bold]c[/bold] :smile:\n"


def test_blocks_are_all_of_a_text() -> None:
    for end in range(len(DOCUMENT) + 1):
        assert "".join(blocks(DOCUMENT[:end])) == DOCUMENT[:end]
        done, rest = split_growing(DOCUMENT[:end])
        assert done + rest == DOCUMENT[:end]


def test_a_block_is_printed_when_the_next_one_has_begun(plain_console: io.StringIO) -> None:
    body = MarkdownBody()
    body.push("one\n\n")
    assert plain_console.getvalue() == ""
    body.push("two")
    assert plain_console.getvalue() == ""
    body.push("\n")
    assert plain_console.getvalue() == "one\n"


# --- one answer


def shown(question: str, style: Style, parameters: ChatParameters | None = None) -> str:
    answer = Answer()
    messages = [{"role": "user", "content": question}]
    asyncio.run(show_answer(FakeBackend(), messages, parameters or ChatParameters(), style, answer))
    return answer.text


def test_thoughts_stand_before_the_answer_and_are_no_part_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("ponder", Style()) == "42"
    assert capsys.readouterr().out == "Thinking...\nHm, let me see.\n...done thinking.\n\n42\n"


def test_thoughts_are_dim_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown("ponder", Style())
    assert capsys.readouterr().out.startswith("\x1b[2mThinking...\n\x1b[0m\x1b[2mHm, \x1b[0m")
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            shown("ponder", Style())
            assert "\x1b" not in capsys.readouterr().out


def test_no_color_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        written = io.StringIO()
        console.open_rich(file=written, force_terminal=True).print(Markdown("some **bold** text"))
        assert ("\x1b[1m" in written.getvalue()) == (value == "")


def test_thoughts_can_be_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("ponder", Style(shows_thoughts=False)) == "42"
    assert capsys.readouterr().out == "42\n"


def test_json_is_never_rendered(capsys: pytest.CaptureFixture[str]) -> None:
    shown("markdown", Style("markdown"), ChatParameters(schema=True))
    assert capsys.readouterr().out == "# Title\n\nSome *text*\nand more.\n\n- one\n- two\n"


@pytest.mark.parametrize(
    ("is_terminal", "term", "flags", "style"),
    [
        (True, "xterm", {}, Style("markdown")),
        (True, "dumb", {}, Style("wrapped")),
        (True, "xterm", {"markdown": False}, Style("wrapped")),
        (True, "xterm", {"wordwrap": False}, Style("plain")),
        (True, "xterm", {"hides_thoughts": True}, Style("markdown", shows_thoughts=False)),
        (False, "xterm", {}, Style("plain", shows_thoughts=False)),
        (False, "xterm", {"markdown": True}, Style("markdown", shows_thoughts=False)),
    ],
)
def test_styles(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, term: str, flags: dict[str, bool], style: Style
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", term)
    defaults = {"markdown": None, "wordwrap": True, "hides_thoughts": False}
    assert Style.for_stdout(**(defaults | flags)) == style


def test_markdown_without_wrapping_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="--nowordwrap"):
        Style.for_stdout(markdown=True, wordwrap=False, hides_thoughts=False)


# --- files


def test_a_file_says_its_name_and_where_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "readme.md"
    file.write_bytes("\ufeffé\n````\ncode\n````\n".encode())
    assert read_attachment(str(file)) == "readme.md:\n`````\né\n````\ncode\n````\n`````"


@pytest.mark.parametrize("content", [b"a\0b", b"\xff\xfe", b"caf\xe9"])
def test_binary_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.bin"
    file.write_bytes(content)
    with pytest.raises(InvalidParameter, match=r"x\.bin is not a text file in UTF-8"):
        read_attachment(str(file))


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (str(tmp_path / "missing"), str(tmp_path), "a\0b"):
        with pytest.raises(InvalidParameter, match="cannot be read"):
            read_attachment(name)
    monkeypatch.setattr("mlxserve.cli.attachment.MAX_BYTES", 3)
    (tmp_path / "long").write_text("four")
    with pytest.raises(InvalidParameter, match="give a part of it"):
        read_attachment(str(tmp_path / "long"))
