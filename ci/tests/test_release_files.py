"""What a release is built from: its page can be read away from the repository, and all is there."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from html.parser import HTMLParser

import check_wheel
import pytest
import release_files
import workspace
from readme_renderer import markdown

ADDRESS = "https://example.org/ours"
PACKAGES = workspace.packages()
RELEASE = workspace.ROOT / ".github/workflows/release.yml"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[why](../../docs/a.md)", f"[why]({ADDRESS}/blob/norm-v0.1.0/docs/a.md)"),
        ("[how](../../docs/a.md#use)", f"[how]({ADDRESS}/blob/norm-v0.1.0/docs/a.md#use)"),
        ("[all](../../docs)", f"[all]({ADDRESS}/tree/norm-v0.1.0/docs)"),
        ("![times](h200.png)", f"![times]({ADDRESS}/raw/norm-v0.1.0/packages/norm/h200.png)"),
        ("[below](#times)", "[below](#times)"),
        ("[paper](https://example.org/1)", "[paper](https://example.org/1)"),
        ("layers[0](x)", "layers[0](x)"),
    ],
)
def test_links_go_to_the_repository_at_the_tag(repository, text, wanted):
    norm = workspace.find("norm", repository)
    (repository / "docs").mkdir()
    for path in (repository / "docs/a.md", norm.folder / "h200.png"):
        path.write_text("")
    told = release_files.absolute(text, norm.folder, ADDRESS, norm.tag, repository)
    assert told == wanted


class Links(HTMLParser):
    """Where the links and pictures of a page go, and the places on it that one can go to."""

    def __init__(self, html: str):
        super().__init__()
        self.targets: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.targets += [value for name, value in attrs if name in ("href", "src")]


@pytest.fixture(scope="module", params=PACKAGES, ids=lambda package: package.name)
def released(request, tmp_path_factory):
    """A package and what its release is built from."""
    folder = tmp_path_factory.mktemp("staged") / "packages" / request.param.name
    return request.param, release_files.stage(request.param, folder, ADDRESS)


def test_page_on_the_index_links_to_what_is_there(released):
    package, staged = released
    page = (staged.folder / "README.md").read_text()
    headings = re.findall(r"^#+ (.*)$", page, re.M)
    places = {"#" + re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}
    targets = Links(markdown.render(page)).targets
    ours = [target for target in targets if target.startswith(ADDRESS)]
    assert ours
    for target in ours:
        path = target.partition(f"/{package.tag}/")[2].partition("#")[0]
        assert path, target
        assert (workspace.ROOT / path).exists(), target
    # The second are those that the renderer sets beside headings.
    known = ("https://", "#user-content-")
    others = {target for target in targets if not target.startswith(known)}
    assert others - places == set()


def test_copy_holds_the_core_as_files_and_no_tests(released):
    package, staged = released
    core = staged.import_folder / "_core"
    assert not core.is_symlink()
    held = {path.name: path.read_bytes() for path in core.glob("*.py")}
    assert held == {path.name: path.read_bytes() for path in workspace.core().glob("*.py")}
    assert not any((staged.folder / name).exists() for name in ("tests", "results"))
    assert staged.tag == package.tag


def test_urls_lead_to_the_package_and_what_it_said_stays(released):
    package, staged = released
    project, before = (
        tomllib.loads((each.folder / "pyproject.toml").read_text())["project"]
        for each in (staged, package)
    )
    urls = project.pop("urls")
    assert project == before
    assert urls["Homepage"] == ADDRESS
    for name, way in {"Source": "tree", "Changelog": "blob"}.items():
        path = urls[name].removeprefix(f"{ADDRESS}/{way}/{package.tag}/")
        assert (workspace.ROOT / path).exists()
        assert path.startswith(f"packages/{package.name}")


def test_sdist_has_no_tests_and_builds_the_wheel(released, tmp_path):
    package, staged = released
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", str(tmp_path)]
    subprocess.run([*command, str(staged.folder)], check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names
    assert not any(check_wheel.is_test(name) for name in names)
    assert check_wheel.problems(package, tmp_path) == []


def test_nothing_is_written_without_an_address(repository, tmp_path):
    norm = workspace.find("norm", repository)
    with pytest.raises(ValueError, match=r"wanted the repository's address .*, got none"):
        release_files.stage(norm, tmp_path / "staged", "")
    assert not (tmp_path / "staged").exists()


def test_release_is_published_without_a_password_with_its_provenance():
    build, publish = RELEASE.read_text().split("\n  publish:\n")
    assert 'nox -s "build(${{ steps.package.outputs.name }})"' in build
    assert "path: dist/build-${{ steps.package.outputs.name }}/*" in build
    assert "id-token: write" in publish
    assert "attestations: write" in publish
    steps = re.findall(r"uses: (\S+)@", publish)
    assert steps[1:] == ["actions/attest-build-provenance", "pypa/gh-action-pypi-publish"]
    assert "secrets." not in build + publish
