"""A class or function of the built documentation has its signature below its name."""

from __future__ import annotations

import sys

import check_site
import pytest

HEADING = '<h2 id="{0}" class="doc doc-heading">\n<span>{0}</span>\n</h2>\n'
SIGNED = HEADING.format("ours.norm") + '<div class="language-python doc-signature highlight"></div>'
UNSIGNED = HEADING.format("ours.Norm") + '<div class="doc doc-contents first">text</div>'


def test_names_without_a_signature_are_told():
    assert check_site.unsigned(SIGNED) == []
    several = SIGNED.replace("<div", '<div class="doc-overloads">\n<div')
    assert check_site.unsigned(several) == []
    assert check_site.unsigned(UNSIGNED + SIGNED) == ["ours.Norm"]
    assert check_site.unsigned(HEADING.format("ours.last")) == ["ours.last"]


@pytest.mark.parametrize(
    ("page", "message"),
    [(None, "got none"), (SIGNED, ""), (UNSIGNED, "ours.Norm is shown without")],
    ids=["no-page", "signed", "unsigned"],
)
def test_site_is_refused_by_what_is_missing(tmp_path, monkeypatch, capsys, page, message):
    if page is not None:
        folder = tmp_path / "packages/norm/reference"
        folder.mkdir(parents=True)
        (folder / "index.html").write_text(page)
    monkeypatch.setattr(sys, "argv", ["check_site.py", str(tmp_path)])
    assert check_site.main() == bool(message)
    assert message in capsys.readouterr().err
