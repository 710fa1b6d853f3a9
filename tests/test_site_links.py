"""The built site: every internal link and anchor leads somewhere, and nothing is loaded from outside."""

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from built_site import SITE, need_site, pages

import dpivon
from tools import notebooks

pytestmark = pytest.mark.site


class Page(HTMLParser):
    """The ids of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {key: value for key, value in attributes if value is not None}
        self.ids.update([found["id"]] if "id" in found else [])
        if tag == "a":
            self.links += [found["href"]] if "href" in found else []
        else:
            self.loads += [found[key] for key in ("src", "href", "data", "poster") if key in found]


def broken(site: Path, names: list[str]) -> list[str]:
    """What is wrong with the links of the pages `names`, a line each."""
    parsed = {name: Page((site / name).read_text()) for name in names}
    found = []
    for name, page in parsed.items():
        found += [f"{name}: the id {key} stands {count} times" for key, count in page.ids.items() if count > 1]
        for link in page.links + page.loads:
            parts = urlsplit(urljoin(f"https://site/{name}", link))
            if parts.netloc != "site" or parts.scheme != "https":
                if link in page.loads and parts.scheme != "data":
                    found.append(f"{name}: loads {link} from outside")
                elif parts.scheme not in ("http", "https", "mailto", "data"):
                    found.append(f"{name}: strange link {link}")
                continue
            target = unquote(parts.path).lstrip("/")
            if not (site / target).is_file():
                found.append(f"{name}: {link} does not exist")
            elif target in parsed and parts.fragment and unquote(parts.fragment) not in parsed[target].ids:
                found.append(f"{name}: {link} has no such anchor")
    return found


def test_links_and_anchors_lead_somewhere() -> None:
    need_site()
    found = broken(SITE, pages())
    assert not found, "\n".join(found)


def test_chapters_open_in_colab_and_binder_and_download() -> None:
    need_site()
    owner_and_name = urlsplit(notebooks.address()).path.strip("/")
    tag = f"v{dpivon.__version__}"  # the release whose dpivon the first cell installs
    for path in notebooks.chapters():
        links = Page((SITE / "book" / f"{path.stem}.html").read_text()).links
        assert f"../_sources/book/{path.name}" in links, f"{path.name}: no download of the notebook"
        assert any(link.endswith(f"/github/{owner_and_name}/blob/{tag}/book/{path.name}") for link in links)
        assert any(f"/gh/{owner_and_name}/{tag}?" in link and path.name in link for link in links)


def test_the_checker_finds_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="x"></p><p id="x"></p><a href="b.html#y">ok</a><a href="b.html#z">no anchor</a><a href="c.html">no</a>'
        '<a href="https://example.org">ok</a><script src="https://example.org/x.js"></script><a href="ftp:x">odd</a>'
    )
    (tmp_path / "b.html").write_text('<p id="y"></p><a href="#y">ok</a><a href="#q">no</a>')
    assert broken(tmp_path, ["a.html", "b.html"]) == [
        "a.html: the id x stands 2 times",
        "a.html: b.html#z has no such anchor",
        "a.html: c.html does not exist",
        "a.html: strange link ftp:x",
        "a.html: loads https://example.org/x.js from outside",
        "b.html: #q has no such anchor",
    ]


def test_a_question_shows_and_its_answer_folds() -> None:
    need_site()
    boxes = answers = 0
    for path in notebooks.chapters():
        page = f"book/{path.stem}.html"
        text = (SITE / page).read_text()
        boxes += len(re.findall(r'<div class="check-yourself admonition">', text))
        folded = re.findall(
            r'(?s)check-yourself admonition">(?:(?!</div>).)*<div class="dropdown admonition">\s*<p[^>]*>Answer<', text
        )
        answers += len(folded)
        assert "Answer." not in re.sub(r"<[^>]*>", "", text), f"{page}: the word stands twice"
    assert boxes == answers >= 3 * len(notebooks.chapters())
