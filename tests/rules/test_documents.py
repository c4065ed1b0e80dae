"""What the documents point at is there: files by relative links, tests by name, commands that can be typed."""

from __future__ import annotations

import re

import pytest
from source_tree import ROOT

from fivefold.core.layout import Layout

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
TEST_NAME = re.compile(r"`(test_\w+)`")
LAYOUT_OPTION = re.compile(r"(?:--layout |layout=)(?:\"([^\"]+)\"|'([^']+)')")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    targets = LINK.findall(document.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (document.parent / target).exists()]


def test_tests_that_are_named_exist():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = {
        name for document in DOCUMENTS for name in TEST_NAME.findall(document.read_text(encoding="utf-8"))
    }
    assert named
    assert not {name for name in named if f"def {name}(" not in tests}


def test_layouts_in_examples_can_be_parsed():
    texts = [
        a or b
        for document in DOCUMENTS
        for a, b in LAYOUT_OPTION.findall(document.read_text(encoding="utf-8"))
    ]
    assert texts
    for text in texts:
        Layout.parse(text)
