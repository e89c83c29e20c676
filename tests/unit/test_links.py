"""Links in the documents to files of the repository and their headings resolve. `make lint` runs this."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(ROOT / name for name in ("config/README.md", "tests/bench/RESULTS.md", "tests/parity/golden/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\[(?:[^\]]|\]\()*?\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]+`", "code", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings on GitHub and the site: lower-case letters, digits and dashes."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(next(each for each in (name, *(f"{name}-{i}" for i in range(1, 99))) if each not in found))
    return found


def broken(page: Path) -> list[str]:
    """Broken links of a page; links to other hosts are not checked."""
    found = []
    for link in LINK.findall(without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        goal = (page.parent / path).resolve() if path else page
        known = goal.exists() and goal.is_relative_to(ROOT)
        if not known or (anchor and (goal.suffix != ".md" or anchor not in anchors(goal))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_resolves(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "a b.txt").touch()
    (tmp_path / "other.md").write_text("# What it's for: `a`, b\n## Twice\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[one](other.md#what-its-for-a-b) [two](other.md#twice-1) [page](#here) [far](https://example.org/x)\n"
        "# Here\n`[code](nothing.md)` ![picture](gone.png) [![badge](gone.svg)](other.md)\n"
        "[three](other.md#thrice) [out](../../etc) [four](#there) [five](other.md#twice-2)\n"
    )
    assert broken(page) == ["gone.png", "gone.svg", "other.md#thrice", "../../etc", "#there", "other.md#twice-2"]
