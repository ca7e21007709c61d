"""The page at `/` in a real browser: clicks, streams, blocks, keys, text that looks like markup.

Needs a `chromium` on the path (Debian's package will do); its last picture of the page is kept in
the folder that pytest gives.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from tests.server.running import ENGINE, RunningServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
]

KEY = "page-key"
MARKUP = (
    "<img src=x onerror=\"document.title='hurt'\"><script>document.title='hurt'</script><b>b</b>"
)
LONG: Any = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [
        {"role": "system", "content": "You tell long stories to children. " * 20},
        {"role": "user", "content": "Tell me about dragons."},
    ],
    "max_tokens": 700,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer.start("--api-key", KEY, *ENGINE)
    assert running.url, "".join(running.lines)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        launched = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    """The page, with the key given; fails on any error in its scripts."""
    opened = browser.new_page(viewport={"width": 1400, "height": 1000}, color_scheme="dark")
    faults: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda entry: faults.append(entry.text) if is_fault(entry) else None)
    opened.goto(server.url)
    opened.get_by_label("API key").fill(KEY)
    opened.get_by_role("button", name="Continue").click()
    expect(opened.locator("#model")).to_have_text("SmolLM2-135M-Instruct")
    opened.mouse.move(5, 5)  # away from the button, where the page has other things now
    yield opened
    opened.close()
    assert not faults


def is_fault(entry: Any) -> bool:
    return entry.type == "error" and "status of 401" not in entry.text  # before the key was given


def change_state(page: Page, change: Callable[[dict[str, Any]], None]) -> None:
    """Let the page see another state than the server's."""

    def fulfil(route: Route) -> None:
        reply = route.fetch()
        state = reply.json()
        change(state)
        route.fulfill(response=reply, body=json.dumps(state))

    page.route("**/dashboard/state*", fulfil)


def answer_with(page: Page, text: str, size: int = 7) -> None:
    """Let the next answers be `text`, in chunks of `size` characters."""
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    events = [
        {"id": "x", "choices": [{"index": 0, "delta": {"content": chunk}}]} for chunk in chunks
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.unroute("**/v1/chat/completions")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )


def answered(page: Page, text: str, size: int = 7) -> Locator:
    """The element of an answer, once all of it is there."""
    answer_with(page, text, size)
    ask(page, "Hi")
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)
    return page.locator(".message.assistant .text").last


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def test_experts_are_drawn_where_there_are_some(browser: Browser, server: RunningServer) -> None:
    """A line for each layer; the strongest is the one with most tokens since the last look."""
    page, looks = browser.new_page(), 0

    def fulfil(route: Route) -> None:
        nonlocal looks
        looks += 1
        counts = {
            "layers": [3, 4],
            "tokens": [[30 * looks, 10 * looks, 0, 0], [900, 0, 0, 100 * looks]],
            "used_per_step": [2.0, 1.5],
            "num_steps": looks,
        }
        route.fulfill(status=200, content_type="application/json", body=json.dumps(counts))

    page.route("**/dashboard/experts", fulfil)
    page.goto(server.url)
    expect(page.locator("#experts-card")).to_be_hidden()
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#experts-card")).to_be_visible()
    expect(page.locator("#experts-size")).to_have_text("2 layers of 4")
    expect(page.locator("#experts-used")).to_have_text("1.8")
    expect(page.locator("#experts-busiest")).to_have_text("90 %")
    expect(page.locator("#experts-busiest")).to_have_text("100 %", timeout=15_000)  # 2nd look
    page.locator("#experts").hover(position={"x": 50, "y": 20})
    expect(page.locator("#experts-note")).to_contain_text("Layer 4, expert 3: 100 tokens of late")
    page.close()


def test_asks_for_the_key_until_it_is_right(browser: Browser, server: RunningServer) -> None:
    page = browser.new_page()
    page.goto(server.url)
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    expect(page.locator("#key-error")).to_be_hidden()
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#key-error")).to_be_visible()
    assert page.locator("#model").inner_text() == ""
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Continue").click()
    expect(dialog).to_be_hidden()
    expect(page.locator("#status")).to_have_text("ready")
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")  # the tab keeps it
    page.close()


def test_the_api_is_described(page: Page, server: RunningServer, tmp_path: Path) -> None:
    """At /docs, from /openapi.json, with files of this server alone."""
    asked: list[str] = []
    page.on("request", lambda sent: asked.append(sent.url))
    page.goto(f"{server.url}/docs")
    headers = {"Authorization": f"Bearer {KEY}"}
    paths = server.request("GET", "/openapi.json", headers=headers).json["paths"]
    expect(page.locator(".route")).to_have_count(sum(map(len, paths.values())))
    chat = page.locator(".route", has_text="POST /v1/chat/completions").first
    chat.locator("summary").click()
    expect(chat.locator("table")).to_contain_text("messages")
    assert all(url.startswith(server.url) for url in asked), asked
    page.screenshot(path=tmp_path / "docs.png")


def test_chat_streams_and_goes_on(page: Page, server: RunningServer) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("You are a helpful assistant.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("12")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is the capital of France?")
    reply = page.locator(".message.assistant")
    expect(reply.locator(".facts")).to_contain_text("tokens/s", timeout=60_000)
    body = sent.value.post_data_json
    assert body["temperature"] == 0 and body["max_tokens"] == 12 and body["stream"] is True
    assert body["messages"][0] == {"role": "system", "content": "You are a helpful assistant."}
    whole = server.request(
        "POST",
        "/v1/chat/completions",
        {"messages": body["messages"], "temperature": 0, "max_tokens": 12},
        {"Authorization": f"Bearer {KEY}"},
    ).json
    text = whole["choices"][0]["message"]["content"]
    assert reply.locator(".text").inner_text() == text
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And of Italy?")
    turns = sent.value.post_data_json["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert turns[2]["content"] == text
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#empty")).to_be_visible()


def test_stop_ends_the_request(page: Page) -> None:
    def without_end(route: Route) -> None:
        route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})

    page.route("**/v1/chat/completions", without_end)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("900")
    ask(page, "Count from one to a thousand in words, and leave no number out.")
    expect(page.locator(".message.assistant .text")).not_to_be_empty(timeout=60_000)
    expect(page.locator("#rows tr")).to_have_count(1)
    expect(page.locator("#rows .tag")).to_have_text("this chat")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".message.assistant .facts")).to_have_text("stopped")
    expect(page.locator("#rows tr")).to_have_count(0)
    expect(page.locator("#running")).to_have_text("0")


def test_refusals_are_shown(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("5000")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=200,
            content_type="text/event-stream",
            body='data: {"error": {"message": "max_tokens=5000 is too much", "code": 400}}\n\n',
        ),
    )
    ask(page, "Hi")
    expect(page.locator(".message.failed .facts")).to_have_text("max_tokens=5000 is too much")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_markup_stays_text(page: Page) -> None:
    """In replies, messages, names of requests and of models, and advice."""
    answer_with(page, MARKUP)

    def change(state: dict[str, Any]) -> None:
        one = {"key": "1", "request_id": MARKUP, "state": MARKUP, "prompt_tokens": 1, "tokens": 2}
        more = {"computed_tokens": 1, "num_blocks": 1, "num_owned_blocks": 1, "age_s": 1.0}
        state.update(model=MARKUP, advice=[MARKUP], running=[{**one, **more}], num_running=1)

    change_state(page, change)
    ask(page, MARKUP)
    for place in (".message.user .text", ".message.assistant .text", "#advice-list li", "#model"):
        expect(page.locator(place)).to_have_text(MARKUP)
    expect(page.locator("#rows tr td").nth(1)).to_have_text(MARKUP)
    assert page.locator("main img, main script, main b b").count() == 0
    assert page.title() == "Quire"


MARKDOWN = """# Fruits

Here are **three** *good* ones, see `fruit.py` or [the list](https://example.com/a_(b)?q=1):

1. Apple
   - red
   - **green**
2. Pear

3. Fig

```python
def f(x):

    return "<b>" * x  # **not bold**
```

| fruit | price |
| --- | ---: |
| fig \\| date | 3 |

> A quote from https://example.com/x.

---
5 * 3 * 2 and snake_case_name and \\*stars\\*
"""


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_markdown_is_drawn(page: Page, size: int) -> None:
    """The same however the answer is cut into chunks."""
    text = answered(page, MARKDOWN.replace("\\\\", "\\"), size)
    shown = {
        "h3": "Fruits",
        "strong": "three|green",
        "em": "good",
        "p code": "fruit.py",
        "a": "the list|https://example.com/x",
        "ol > li > ul > li": "red|green",
        "th": "fruit|price",
        "td": "fig | date|3",
        "blockquote": "A quote from https://example.com/x.",
        "pre code": 'def f(x):\n\n    return "<b>" * x  # **not bold**',
        "> p:last-child": "5 * 3 * 2 and snake_case_name and *stars*",
    }
    for selector, expected in shown.items():
        found = text.locator(selector).evaluate_all("all => all.map(one => one.textContent)")
        assert "|".join(found) == expected, selector
    assert text.locator("hr").count() == 1
    assert text.locator("ol").evaluate_all("all => all.map(one => one.start)") == [1, 3]
    first = text.locator("a").first
    assert first.get_attribute("href") == "https://example.com/a_(b)?q=1"
    assert first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert first.get_attribute("target") == "_blank"


HOSTILE_LINKS = [
    "[x](javascript:document.title='hurt')",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:x) [x](file:///etc/passwd) [x](//example.com) [x](/metrics) [x](blob:x)",
    "![x](data:image/svg+xml,<svg/onload=alert(1)>)",
]


@pytest.mark.parametrize("source", HOSTILE_LINKS)
def test_links_to_anything_but_the_web_stay_text(page: Page, source: str) -> None:
    text = answered(page, source)
    expect(text).to_have_text(source)
    assert text.locator("a, img, svg, script").count() == 0


def test_answers_load_nothing_and_links_do_not_nest(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    text = answered(
        page, "![a](https://example.com/p.png) [https://example.org](https://example.com)"
    )
    assert text.locator("img").count() == 0 and text.locator("a a").count() == 0
    assert text.locator("a").evaluate_all("all => all.map(one => one.hostname)") == (
        ["example.com", "example.com"]
    )
    assert not [url for url in asked if "example" in url]


PIECES = (
    *("**a ", "*a", "_a ", "__a ", "~~a", "`a", "``a`", "[", "[a](", "![a](b", "https://a.b/"),
    *("> ", "- ", "  - a\n    ", "1. ", "#", "|-", "|a\n|-\n", "```\n", "<b>", "\\"),
)


def test_long_hostile_answers_do_not_hold_the_page_up(page: Page) -> None:
    """100,000 characters each; a pattern that takes quadratic time would need minutes."""
    for piece in PIECES:
        page.get_by_role("button", name="New chat").click()
        started = time.monotonic()
        text = answered(page, piece * (100_000 // len(piece)), 20_000)
        assert time.monotonic() - started < 30.0, piece
        if piece not in ("```\n", "> ", "- ", "1. "):
            assert text.evaluate("one => one.textContent.length") >= 10_000, piece
    assert page.title() == "Quire"


def test_text_cannot_be_made_markup(browser: Browser, server: RunningServer) -> None:
    """The policy would stop a careless change of the page too."""
    page = browser.new_page()
    page.goto(server.url)
    refused = page.evaluate(
        """() => { try { document.body.innerHTML = "<b>x</b>"; return "" }
                   catch (error) { return error.message } }"""
    )
    assert "TrustedHTML" in refused
    page.close()


def test_blocks_of_requests(page: Page, server: RunningServer, tmp_path: Path) -> None:
    """Two requests share a prefix; pointing at one marks its blocks, a click keeps it marked."""
    client = server.client(api_key=KEY)
    streams = [
        client.chat.completions.create(
            **LONG, stream=True, extra_headers={"X-Request-Id": f"story-{i}"}
        )
        for i in range(2)
    ]
    rows = page.locator("#rows tr")
    expect(rows).to_have_count(2, timeout=60_000)
    expect(page.locator("#table-view")).to_be_hidden()
    shared = page.locator("#legend li", has_text="shared")
    expect(shared).not_to_have_text("shared 0 · 0 %", timeout=60_000)
    rows.nth(1).hover()
    entries = page.locator("#table .entry")
    expect(entries.first).to_contain_text("0 → ")
    name = rows.nth(1).locator("td").first.inner_text()
    expect(page.locator("#table-title")).to_contain_text(name)
    key = rows.nth(1).get_attribute("data-key")
    headers = {"Authorization": f"Bearer {KEY}"}
    state = server.request("GET", f"/dashboard/state?sequence={key}", headers=headers).json
    for logical, physical in enumerate(state["table"]["blocks"][:5]):
        assert entries.nth(logical).inner_text() == f"{logical} → {physical}"
    assert marked_pixels(page) > 0
    page.mouse.move(5, 5)
    expect(page.locator("#table-view")).to_be_hidden()
    assert marked_pixels(page) == 0
    rows.nth(0).click()
    page.mouse.move(5, 5)
    expect(rows.nth(0)).to_have_class("marked")
    expect(page.locator("#table-view")).to_be_visible()
    expect(page.locator("#generation-rate")).not_to_have_text("0", timeout=20_000)
    page.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    for stream in streams:
        stream.close()
    expect(rows).to_have_count(0)


def marked_pixels(page: Page) -> int:
    """Pixels of the map in the colour of marked blocks."""
    count: int = page.evaluate(
        """() => {
          const style = getComputedStyle(document.documentElement);
          const value = parseInt(style.getPropertyValue("--marked").trim().slice(1), 16);
          const canvas = document.getElementById("blocks");
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          let found = 0;
          for (let i = 0; i < data.length; i += 4) {
            found += (data[i] << 16 | data[i + 1] << 8 | data[i + 2]) === value;
          }
          return found;
        }"""
    )
    return count


def test_many_blocks_show_who_holds_them(page: Page) -> None:
    """11,650 scattered blocks: grouped by owner, then by number; each cell says what it holds."""
    size = 11_648
    states = [3] * 1456 + [2] * 4368 + [1] * 2912 + [0] * 2912
    random.Random(1).shuffle(states)
    listed = [
        {"key": str(i), "request_id": f"request-{i}", "state": "running", "prompt_tokens": 9}
        | {"tokens": 10, "computed_tokens": 9, "num_blocks": 50, "num_owned_blocks": 42}
        | {"age_s": 1.0}
        for i in range(100)
    ]  # the other 168 blocks belong to requests that are not listed

    def change(state: dict[str, Any]) -> None:
        packed = bytes(sum(states[i + k] << (2 * k) for k in range(4)) for i in range(0, size, 4))
        state.update(blocks=base64.b64encode(packed).decode(), num_blocks=size)
        state.update(running=listed, num_running=104)

    change_state(page, change)
    for entry in ("free 2,912 · 25 %", "cached 2,912 · 25 %", "owned 4,368 · 38 %"):
        expect(page.locator("#legend")).to_contain_text(entry)
    note, canvas = page.locator("#block-note"), page.locator("#blocks")
    expect(note).to_contain_text("Each square is 8 blocks: shared blocks first")
    box = canvas.bounding_box()
    assert box is not None and box["height"] <= 225  # all of it is seen without scrolling
    canvas.hover(position={"x": 3, "y": 3})
    expect(note).to_have_text("8 blocks: shared.")
    canvas.hover(position={"x": 3, "y": box["height"] / 2 - 20})
    expect(note).to_contain_text("8 blocks: owned, held by request-")
    canvas.hover(position={"x": 3, "y": box["height"] - 3})
    expect(note).to_have_text("8 blocks: free.")
    few = colours_of_cells(page)
    page.get_by_role("button", name="By owner").click()
    canvas.hover(position={"x": 3, "y": 3})
    expect(note).to_contain_text("Blocks 0 to 7: ")
    assert len(colours_of_cells(page)) > 50 * len(few) / 10  # scattered: nearly every cell differs


def colours_of_cells(page: Page) -> list[str]:
    """Changes of colour along the map's rows: few where blocks of one kind lie together."""
    found: list[str] = page.evaluate(
        """() => {
          const canvas = document.getElementById("blocks");
          const { width, height } = canvas;
          const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
          const changes = [];
          for (let y = 3; y < height; y += 9) {
            let last = "";
            for (let x = 0; x < width; x += 1) {
              const at = (y * width + x) * 4;
              const shade = data.slice(at, at + 4).join();
              if (data[at + 3] === 0 || shade === last) continue;
              changes.push(shade);
              last = shade;
            }
          }
          return changes;
        }"""
    )
    return found


def test_a_hundred_thousand_blocks(page: Page) -> None:
    """All of them are in the map, and it fits on the page."""
    size = 100_000

    def change(state: dict[str, Any]) -> None:
        packed = bytes([0b11100100]) * (size // 4)  # free, cached, owned, shared, and so on
        state.update(blocks=base64.b64encode(packed).decode(), num_blocks=size)

    change_state(page, change)
    for name in ("free", "cached", "owned", "shared"):
        expect(page.locator("#legend")).to_contain_text(f"{name} 25,000 · 25 %")
    canvas = page.locator("#blocks")
    box = canvas.bounding_box()
    assert box is not None and box["height"] <= 225
    expect(page.locator("#block-note")).to_contain_text("Each square is 64 blocks")
    page.get_by_role("button", name="By owner").click()
    canvas.hover(position={"x": 3, "y": 3})
    expect(page.locator("#block-note")).to_have_text(
        "Blocks 0 to 63: 16 shared, 16 owned, 16 cached, 16 free."
    )


def test_colours(page: Page) -> None:
    def back() -> str:
        colour: str = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return colour

    dark = back()
    button = page.get_by_role("button", name="Theme")
    button.click()
    expect(button).to_have_text("Theme: dark")
    assert back() == dark
    button.click()
    expect(button).to_have_text("Theme: light")
    assert back() != dark
    button.click()
    expect(button).to_have_text("Theme: system")
    page.emulate_media(color_scheme="light")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")


def test_narrow_screens(page: Page) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("() => document.documentElement.scrollWidth <= 400")
