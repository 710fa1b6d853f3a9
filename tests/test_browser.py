"""The built site in a real browser: every page, light and dark, wide and narrow."""

import functools
import gzip
import http.server
import shutil
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from built_site import SITE, missing, need_site, pages
from playwright.sync_api import Browser, Locator, Page, sync_playwright

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]
WIDTHS = {"wide": (1280, 900), "narrow": (390, 844)}

# What axe looks for. All of it once; then what can change with the colors and with the width.
RULES = {
    ("light", "wide"): {},
    ("dark", "wide"): {"runOnly": ["color-contrast", "link-in-text-block"]},
    ("light", "narrow"): {"runOnly": ["scrollable-region-focusable", "button-name", "link-name", "aria-hidden-focus"]},
    ("dark", "narrow"): {"runOnly": ["button-name"]},
}

# Waits for MathJax and returns what a reader would see go wrong.
LOOK = """async () => {
    if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
    await document.fonts.ready;
    const found = [];
    const RAW = /\\\\[a-zA-Z]{2,}|\\$\\$|\\{(term|doc|eq|ref|numref|cite(:\\w)?)\\}|:(math|ref|doc):`/;
    for (const node of document.querySelectorAll("mjx-merror, [data-mjx-error]"))
        found.push("MathJax error: " + (node.getAttribute("data-mjx-error") || node.textContent));
    for (const node of document.querySelectorAll(".math"))
        if (!node.querySelector("mjx-container"))
            found.push("unrendered mathematics: " + node.textContent.slice(0, 80));
    const walker = document.createTreeWalker(document.querySelector("article, main, body"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode;
        if (text.parentElement.closest("pre, code, script, style, mjx-container, .math, .search")) continue;
        if (RAW.test(text.data)) found.push("raw markup: " + text.data.trim().slice(0, 80));
    }
    for (const image of document.querySelectorAll("img")) {
        const inText = image.closest("article");
        if (!image.hasAttribute("alt") || (inText && !image.alt.trim())) found.push("no alt text: " + image.src);
        if (image.complete && !image.naturalWidth) found.push("not shown: " + image.src);
    }
    return found;
}"""

# The page must not scroll sideways; what is wide scrolls within itself.
OVERFLOW = """() => {
    const width = document.documentElement.clientWidth;
    if (document.scrollingElement.scrollWidth <= width) return [];
    return [...document.querySelectorAll("article *")]
        .filter(node => node.getBoundingClientRect().right > width + 1)
        .map(node => node.tagName + "." + node.className).slice(0, 5)
        .concat("the page is " + document.scrollingElement.scrollWidth + " wide");
}"""


# What is only there to click must not be printed, a folded answer opens, and nothing is cut off at the page's width.
PAPER = """width => {
    window.dispatchEvent(new Event("beforeprint"));
    const found = [];
    const clicked = ".bd-sidebar-primary, .bd-sidebar-secondary, .bd-header-article, .prev-next-footer, .copybtn, "
        + ".toggle-button, .headerlink, details:not([open]) > summary";
    for (const node of document.querySelectorAll(clicked))
        if (node.getClientRects().length) found.push("printed: " + node.outerHTML.slice(0, 80));
    for (const node of document.querySelectorAll(".admonition.toggle-hidden"))
        found.push("folded on paper: " + node.textContent.trim().slice(0, 80));
    const cut = node => node.getBoundingClientRect().right > width + 1
        || (node.tagName == "PRE" && node.scrollWidth > node.clientWidth + 1);
    for (const node of document.querySelectorAll("article :is(pre, table, img, mjx-container)"))
        if (cut(node))
            found.push("cut off on paper: " + node.tagName + " " + node.textContent.trim().slice(0, 80));
    window.dispatchEvent(new Event("afterprint"));
    return found;
}"""
# A4 less its margins, at 96 dots an inch.
SHEET = {"width": 665, "height": 1000}

# All that a page and its frames have loaded.
LOADED = "() => [location.href, ...performance.getEntriesByType('resource').map(entry => entry.name)]"
HEAVIEST = 1_500_000


@functools.cache
def transferred(path: str) -> int:
    """The bytes of a file of the site as a server sends it."""
    return len(gzip.compress((SITE / path).read_bytes(), 6))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the site on a free local port."""
    need_site()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        missing("no chromium: install it (Debian, Ubuntu: `sudo apt install chromium`) to check the site in a browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page of the browser that writes down what goes wrong in it."""

    def __init__(self, browser: Browser, address: str, scheme: str) -> None:
        self.address = address
        self.scheme = scheme
        self.errors: list[str] = []
        self.context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda m: self.errors.append(f"console: {m.text}") if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(f"script: {error}"))
        self.page.on("request", self.outside)
        self.page.on("response", lambda r: self.errors.append(f"{r.status}: {r.url}") if r.status >= 400 else None)

    def outside(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.errors.append(f"outside request: {request.url}")

    def too_heavy(self, most: int = HEAVIEST) -> list[str]:
        """That the page is larger than it may be, as transferred to a new reader, with what it loads."""
        urls = {url for frame in self.page.frames for url in frame.evaluate(LOADED) if url.startswith(self.address)}
        sizes = {path: transferred(path) for path in {unquote(urlsplit(url).path).lstrip("/") for url in urls}}
        if (total := sum(sizes.values())) <= most:
            return []
        largest = ", ".join(
            f"{path} {size // 1000} kB" for size, path in sorted(zip(sizes.values(), sizes, strict=True))[:-6:-1]
        )
        return [f"{total / 1e6:.2f} MB as transferred, at most {most / 1e6} are allowed: {largest}"]

    def misprinted(self) -> list[str]:
        """What would be wrong on paper."""
        before = self.page.viewport_size
        self.page.emulate_media(media="print")
        self.page.set_viewport_size(SHEET)  # type: ignore[arg-type]
        found = self.page.evaluate(PAPER, SHEET["width"])
        self.page.emulate_media(media="screen")
        self.page.set_viewport_size(before)  # type: ignore[arg-type]
        return found

    def problems(self, name: str, width: str) -> list[str]:
        """All that is wrong with the page `name` at this width."""
        self.page.set_viewport_size(dict(zip(("width", "height"), WIDTHS[width], strict=True)))  # type: ignore[arg-type]
        self.page.goto(f"{self.address}/{name}")
        found = self.page.evaluate(LOOK) + self.page.evaluate(OVERFLOW) + self.too_heavy()
        options = {"preload": False, "resultTypes": ["violations"], **RULES[self.scheme, width]}
        # Highlighted code is thousands of elements in the same few colours: the source listing stands for all of it.
        exclude = ["mjx-container"] if name.startswith("_modules") else ["mjx-container", ".highlight"]
        axe = Axe().run(self.page, context={"exclude": exclude}, options=options)
        for violation in axe.response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                found += [f"axe {violation['id']}: {node['html'][:120]}" for node in violation["nodes"][:3]]
        if width == "wide":  # last, for it opens and closes answers
            found += self.misprinted()
        found, self.errors = self.errors + found, []
        return [f"{width}: {problem}" for problem in found]


# With xdist, each scheme is one worker's: --dist loadgroup.
@pytest.fixture(
    scope="module", params=[pytest.param(scheme, marks=pytest.mark.xdist_group(scheme)) for scheme in ("light", "dark")]
)
def visit(request: pytest.FixtureRequest, browser: Browser, address: str) -> Iterator[Visit]:
    visit = Visit(browser, address, request.param)
    yield visit
    visit.context.close()


def visited() -> list[str]:
    """All pages but the index, which only forwards; of the module's source listings, made by one template, one."""
    listings = [page for page in pages() if page.startswith("_modules/dpivon/")]
    return [page for page in pages() if page not in ("index.html", *listings[1:])] or ["no page"]


@pytest.mark.parametrize("name", visited())
def test_page(visit: Visit, name: str) -> None:
    found = visit.problems(name, "wide") + visit.problems(name, "narrow")
    assert not found, "\n".join(found)


def test_index_leads_to_the_book(visit: Visit) -> None:
    visit.page.goto(f"{visit.address}/index.html")
    visit.page.wait_for_url("**/book/intro.html")


def test_search_finds_a_word(visit: Visit) -> None:
    visit.page.goto(f"{visit.address}/search.html?q=sensitivity")
    visit.page.wait_for_selector("#search-results li a")


def test_search_opens_from_the_keyboard(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 1280, "height": 900})
    visit.page.goto(f"{visit.address}/book/glossary.html")
    visit.page.keyboard.press("Control+k")
    visit.page.keyboard.type("curvature")
    visit.page.keyboard.press("Enter")
    visit.page.wait_for_selector("#search-results li a")
    assert "search.html?q=curvature" in visit.page.url


def test_code_is_copied(visit: Visit) -> None:
    """Each cell has a button that puts its code, and nothing else, on the clipboard: no prompt, no result."""
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])

    def copied(block: Locator) -> str:
        block.hover()
        block.locator(".copybtn").click()
        block.locator(".copybtn.success").wait_for()
        return str(visit.page.evaluate("navigator.clipboard.readText()")).strip()

    visit.page.goto(f"{visit.address}/book/setup.html")
    blocks = visit.page.locator("article div.highlight")
    assert blocks.count() == blocks.locator(".copybtn").count() > 0
    assert copied(blocks.first) == blocks.first.locator("pre").inner_text().strip()
    visit.page.goto(f"{visit.address}/book/api.html")
    example = visit.page.locator("article div.doctest").first
    lines = example.locator("pre").inner_text().splitlines()
    assert any(not line.startswith((">>> ", "... ")) for line in lines)
    code = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
    assert copied(example).splitlines() == [line.strip("\n") for line in code]


def test_mathematics_can_be_read_on_a_phone(visit: Visit) -> None:
    """It is as large as the text, and an equation that is wider than the screen scrolls by itself."""
    visit.page.set_viewport_size({"width": 390, "height": 844})
    visit.page.goto(f"{visit.address}/book/03_counting_the_cost.html")
    formulas, small, scrolls = visit.page.evaluate(
        """async () => { await MathJax.startup.promise;
        const size = node => parseFloat(getComputedStyle(node).fontSize);
        const math = [...document.querySelectorAll("article mjx-container")];
        const small = math.filter(node => size(node) < 0.95 * size(node.closest("p, li, div, td, dd")));
        const equation = document.querySelector("article div.math");
        equation.insertAdjacentHTML("beforeend", '<div style="min-width: 900px">wide</div>');
        const scrolls = equation.scrollWidth >= 900 && getComputedStyle(equation).overflowX == "auto";
        return [math.length, small.length, scrolls]; }"""
    )
    assert formulas > 100
    assert small == 0
    assert scrolls
    assert visit.page.evaluate(OVERFLOW) == []


def test_figures_follow_the_theme(visit: Visit) -> None:
    """In the dark a figure is inverted, so that its white paper becomes the page's background."""
    visit.page.goto(f"{visit.address}/book/glossary.html")
    for theme in ("light", "dark"):
        visit.page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
        filters = visit.page.evaluate(
            """() => { const image = document.createElement("img"), cell = document.createElement("div");
            cell.className = "cell_output"; cell.append(image); document.querySelector("article").append(cell);
            const style = getComputedStyle(image); const used = [style.filter, style.mixBlendMode]; cell.remove();
            return used; }"""
        )
        assert filters == (["none", "normal"] if theme == "light" else ["invert(1) hue-rotate(180deg)", "screen"])


def test_paper_is_white(visit: Visit) -> None:
    visit.page.goto(f"{visit.address}/book/glossary.html")
    for event, theme in (("beforeprint", "light"), ("afterprint", visit.scheme)):
        visit.page.evaluate("event => { window.dispatchEvent(new Event(event)); }", event)
        assert visit.page.evaluate("document.documentElement.dataset.theme") == theme


def test_the_check_finds_what_is_wrong(visit: Visit) -> None:
    """Each kind of defect, planted into a page, is reported."""
    page = visit.page
    page.goto(f"{visit.address}/book/glossary.html")
    assert page.evaluate(LOOK) == []
    page.evaluate(
        r"""() => { document.querySelector("article").insertAdjacentHTML("beforeend",
        '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw="><p>\\sigma</p><p>{term}`x`</p>'
        + '<span class="math">x</span>'
        + '<mjx-merror data-mjx-error="bad"></mjx-merror><div style="width: 3000px">wide</div>'); }"""
    )
    found = page.evaluate(LOOK)
    for kind in (
        "no alt text",
        r"raw markup: \sigma",
        "raw markup: {term}",
        "unrendered mathematics",
        "MathJax error: bad",
    ):
        assert any(kind in line for line in found), kind
    assert page.evaluate(OVERFLOW)
    assert "MB as transferred" in visit.too_heavy(most=1000)[0]
    page.evaluate(
        """() => { document.querySelector("article").insertAdjacentHTML("beforeend",
        '<details style="display: block !important"><summary>x</summary></details>'
        + '<div class="admonition toggle-hidden">x</div>'); }"""
    )
    printed = visit.misprinted()
    for kind in ("printed: <summary>", "folded on paper: x"):
        assert any(kind in line for line in printed), kind
    page.evaluate(
        """() => { document.querySelector("article").insertAdjacentHTML("beforeend",
        '<table style="min-width: 700px"><tr><td>x</td></tr></table>'); }"""
    )
    assert any("cut off on paper: TABLE" in line for line in visit.misprinted())
    page.evaluate("() => { console.error('planted'); fetch('https://example.invalid/x').catch(() => 0); }")
    page.wait_for_timeout(300)
    assert any("planted" in error for error in visit.errors)
    assert any("outside request" in error for error in visit.errors)
    visit.errors.clear()
