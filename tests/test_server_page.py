"""The page in a real browser: everything by keyboard, nothing lost when the server goes away."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import LIMIT, STORY, Serving, offline, open_engine, scripted, serving

from colibri import turn as turns

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium chromium-driver"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-dev-shm-usage",
)  # fmt: skip
MARKDOWN = """Let me think.</think>Here is *how*:

1. Read the `file`
2. **Write** it

```python
print("<b>hello</b>")
```

[docs](https://example.org/x) [bad](javascript:alert(1)) <script>document.title = "bad"</script>"""


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """The demo model, drafting."""
    with serving(open_engine(draft="3", temperature="0")) as running:
        yield running


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Chromium for all tests, with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    browser = webdriver.Chrome(options=options, service=service)
    yield browser
    browser.quit()


class Page:
    """The page as a test sees it."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.size(1280, 800)
        driver.get(url)
        driver.execute_script("sessionStorage.clear()")
        driver.get(url)
        self.wait(lambda: self.text("status") == "ready")

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Until it is true; returns it."""
        return WebDriverWait(self.driver, LIMIT, 0.05).until(lambda _: condition())

    def text(self, id: str) -> str:
        """What is to be read in an element."""
        return self.driver.find_element(By.ID, id).text

    def all(self, selector: str) -> list[Any]:
        """Elements."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def type(self, *keys: str) -> None:
        """Keys, to whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def ask(self, text: str) -> None:
        """Send a message by keyboard."""
        self.type(text, Keys.ENTER)

    def answers(self) -> list[str]:
        """The bodies of the model's messages, once none is being written."""
        self.wait(lambda: not self.all(".writing"))
        return [node.text for node in self.all(".assistant .body")]

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """The window and the colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def shot(self, path: Path) -> None:
        """For people to look at."""
        self.driver.save_screenshot(str(path))


@pytest.fixture
def page(driver: Any, server: Serving) -> Iterator[Page]:
    """A fresh page; afterwards its console has no error of its own."""
    page = Page(driver, f"{server.url}/")
    yield page
    errors = [e["message"] for e in driver.get_log("browser") if e["level"] == "SEVERE"]
    assert [e for e in errors if "Failed to load resource" not in e] == []
    server.settle()


def test_send_and_reload(page, server, tmp_path):
    """A message is answered as it streams; the conversation and its figures outlive a reload."""
    page.ask(STORY[0]["content"])
    page.wait(lambda: page.all(".assistant .body"))
    story = offline(server.engine, STORY)
    assert page.answers() == [story]
    page.wait(lambda: page.text("which") == "of the last answer")
    assert float(page.text("rate").replace(",", "")) > 0
    assert " of " in page.text("drafts") and "kept" in page.text("drafted")
    assert "in memory" in page.text("experts") and "across" in page.text("map-text")
    page.driver.refresh()
    page.wait(lambda: page.text("status") == "ready")
    assert page.answers() == [story]
    page.ask("More.")
    page.wait(lambda: len(page.all(".assistant .body")) == 2)
    messages = [*STORY, {"role": "assistant", "content": story}]
    assert page.answers()[1] == offline(
        server.engine, [*messages, {"role": "user", "content": "More."}]
    )
    page.wait(lambda: page.text("which") == "of the last answer")
    page.shot(tmp_path / "desktop.png")


def test_stop_by_keyboard(page, server, monkeypatch):
    """Escape stops an answer; what was written stays, and the next message is answered."""
    real = turns.spec_decode

    def endless(*arguments: Any, **more: Any):
        import time

        for tokens in real(*arguments, **more):
            time.sleep(0.02)
            yield tokens
        return "stop"

    with monkeypatch.context() as patch:
        patch.setattr(turns, "spec_decode", endless)
        page.ask(STORY[0]["content"])
        page.wait(lambda: page.all(".writing .body") and "Once" in page.all(".body")[-1].text)
        page.type(Keys.ESCAPE)
        (partial,) = page.answers()
    assert offline(server.engine, STORY).startswith(partial)
    assert page.all(".assistant .note")[0].text == "stopped"
    server.settle()
    page.ask("Hello")
    page.wait(lambda: len(page.all(".assistant")) == 2)
    assert page.answers()[1]


def test_reasoning_code_and_safety(page, server, monkeypatch):
    """Reasoning folds away, Markdown becomes elements, and nothing written becomes markup."""
    with scripted(monkeypatch, server, "<think>" + MARKDOWN):
        page.ask("Show me code")
        page.wait(lambda: page.all(".block"))
        page.answers()
    fold = page.all(".reasoning")[0]
    assert fold.get_attribute("open") is None
    fold.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert fold.get_attribute("open") is not None and "Let me think." in fold.text
    assert page.all(".block pre code")[0].text == 'print("<b>hello</b>")'
    assert [li.text for li in page.all(".assistant .body li")] == ["Read the file", "Write it"]
    links = [a.get_attribute("href") for a in page.all(".assistant .body a")]
    assert links == ["https://example.org/x"] and page.driver.title == "colibri"
    assert "<script>" in page.all(".assistant .body")[0].text
    assert not page.all("#log script")


def test_server_gone_and_back(driver):
    """Without a server the page says so, keeps everything, and goes on when it is back."""
    engine = open_engine(temperature="0")
    with serving(engine) as first:
        page = Page(driver, f"{first.url}/")
        port = first.port
    page.wait(lambda: "gone" in page.text("status"))
    page.ask(STORY[0]["content"])
    page.wait(lambda: page.all(".note.bad button"))
    assert "cannot be reached" in page.all(".note.bad")[0].text
    with serving(open_engine(temperature="0"), at=port) as second:
        page.wait(lambda: page.text("status") == "ready")
        page.all(".note.bad button")[0].send_keys(Keys.ENTER)
        page.wait(lambda: page.all(".assistant .body") and page.all(".assistant .body")[0].text)
        assert page.answers() == [offline(second.engine, STORY)]
    driver.get_log("browser")


@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 800)])
@pytest.mark.parametrize("dark", [False, True])
def test_sizes_and_colours(page, width, height, dark, tmp_path):
    """Nothing is wider than the window; text stands out from its ground; all has its name."""
    page.size(width, height, dark)
    page.ask(STORY[0]["content"])
    page.wait(lambda: page.all(".assistant .body"))
    page.answers()
    views = ["chat", "receipt"] if width < 820 else ["chat"]
    for view in views:
        if view == "receipt":
            page.driver.find_element(By.ID, "toggle").send_keys(Keys.ENTER)
        page.wait(lambda: page.driver.execute_script(RECEIPT) == "of the last answer")
        page.shot(tmp_path / f"{view}.png")
        assert page.driver.execute_script("return document.documentElement.scrollWidth") == width
        contrasts = page.driver.execute_script(CONTRASTS)
        assert contrasts and min(c for _, c in contrasts) >= 4.5, sorted(
            contrasts, key=lambda c: c[1]
        )
        unnamed = page.driver.execute_script(UNNAMED)
        assert unnamed == []


def test_keyboard_alone(page):
    """Tab reaches every control that can be seen, each shows its focus, and the log scrolls."""
    reached: set[str] = set()
    for _ in range(30):
        page.type(Keys.TAB)
        name, tag, style = page.driver.execute_script(FOCUSED)
        assert tag == "BODY" or style == "solid"
        if name in reached:
            break
        reached.add(name)
    assert {"prompt", "send", "fresh", "log", "summary"} <= reached


FOCUSED = """
const node = document.activeElement;
return [node.id || node.tagName.toLowerCase(), node.tagName, getComputedStyle(node).outlineStyle];
"""
RECEIPT = 'return document.getElementById("which").textContent'
CONTRASTS = """
const lum = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map((v) => v / 255)
  .map((v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const ground = (n) => { for (; n; n = n.parentElement) {
  const c = getComputedStyle(n).backgroundColor; if (!c.startsWith("rgba(0, 0, 0, 0")) return c; }
  return "rgb(255, 255, 255)"; };
return [...document.querySelectorAll("body *")].filter((n) => n.checkVisibility() && !n.disabled &&
  [...n.childNodes].some((t) => t.nodeType === 3 && t.textContent.trim())).map((n) => {
  const [a, b] = [lum(getComputedStyle(n).color), lum(ground(n))].sort((x, y) => y - x);
  return [n.tagName + "#" + n.id + "." + n.className, (a + .05) / (b + .05)]; });
"""
UNNAMED = """
return [...document.querySelectorAll("button, input, select, textarea, [role=img]")].filter((n) =>
  !(n.textContent.trim() || n.getAttribute("aria-label") || n.getAttribute("aria-labelledby") ||
    (n.labels && n.labels.length))).map((n) => n.outerHTML);
"""
