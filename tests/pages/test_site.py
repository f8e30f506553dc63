"""`make docs`: the site builds without a warning, has every public name, and no link leads nowhere."""
from __future__ import annotations

import re

from test_examples import ROOT, python

import autoshard


def test_the_site_builds_and_has_every_public_name(tmp_path):
    """--strict: a page that is left out of the navigation, or a link or anchor that leads nowhere, is an error."""
    python("-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path / "site", cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    api = (tmp_path / "site" / "api.html").read_text()
    assert [name for name in autoshard.__all__ if f'id="autoshard{name}"'.lower() not in api.lower().replace(".", "")] == []
    assert "no docstring" not in api
    assert re.search("<h1[^>]*>autoshard", (tmp_path / "site" / "index.html").read_text())
