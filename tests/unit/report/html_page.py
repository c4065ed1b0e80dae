"""A page as a browser takes it, for the tests of reports."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "input", "hr"}
FETCHING = {"src", "srcset", "data", "poster", "action", "formaction", "background", "cite", "ping"}


class Page(HTMLParser):
    """Tags must nest and close, ids be unique; keeps attributes and visible text for the tests."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []
        ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def figures(html: str) -> dict[str, list[str]]:
    """The texts drawn in each figure, by section."""
    sections = re.findall(r'<section class="card" id="(\w+)">\s*<figure>(.*?)</figure>', html, re.DOTALL)
    return {name: re.findall(r"<text[^>]*>([^<]*)</text>", figure) for name, figure in sections}


def check_alone(html: str, *urls: str) -> None:
    """Nothing is fetched or run, references point at something, colours are the page's; `urls` may stand as text."""
    page = Page(html)
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed", "img", "image", "base"}
        assert not FETCHING & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")
    assert "@import" not in html
    assert set(re.findall(r"\w+://[^\s<]*", html)) == set(urls)
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    values = [value for _, attributes in page.tags for value in attributes.values() if value]
    wanted = {value[1:] for _, a in page.tags for key, value in a.items() if key == "href" and value}
    targets = [url for value in values for url in re.findall(r"url\((.*?)\)", value)]
    assert all(url.startswith("#") for url in targets)
    wanted |= {url[1:] for url in targets}
    assert wanted
    assert wanted <= ids
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set()
    assert set(re.findall(r"var\((--[\w-]+)\)", html)) <= set(re.findall(r"(--[\w-]+):", html))
