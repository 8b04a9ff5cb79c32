"""A release needs its changelog entry, its tag, and a version step that fits what changed."""

from __future__ import annotations

import subprocess

import pytest
import release_check
import workspace

LOG = "# Log\n\n## 0.2.0 - 2026-11-21\n\n- Rows of zeros.\n\n## 0.1.0 - 2026-10-01\n\n- First.\n"
TAGS = ["norm-v0.1.0", "norm-v0.10.0", "norm-v0.9.3", "norm-vx", "normal-v0.11.0"]


def test_last_release_is_by_version_and_not_by_spelling():
    assert release_check.last_release("norm", (0, 11, 0), TAGS) == "norm-v0.10.0"
    assert release_check.last_release("norm", (0, 10, 0), TAGS) == "norm-v0.9.3"
    assert release_check.last_release("norm", (0, 1, 0), TAGS) is None


def test_tag_names_the_package_that_it_releases(repository):
    packages = workspace.packages(repository)
    assert release_check.package_of("norm-v0.3.0", packages) == "norm"
    assert release_check.package_of("memory-mlp-v10.0.1", packages) == "memory-mlp"
    for tag in ("integration-v0.1.0", "testkit-v0.1.0", "norm-v0.3", "norm", "v1.0.0"):
        with pytest.raises(SystemExit, match=rf"one of memory-mlp, norm, got '{tag}'"):
            release_check.package_of(tag, packages)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LOG, None),
        (LOG.replace("## 0.2.0 - 2026-11-21", "## [0.2.0] — 2026-11-21"), None),
        (LOG.replace(" - 2026-11-21", " - unreleased"), "wanted a date"),
        (LOG.replace("- Rows of zeros.\n", ""), "wanted at least one line about 0.2.0"),
        (LOG.replace("0.2.0", "0.3.0"), "wanted 0.2.0 as CHANGELOG.md's newest entry, got 0.3.0"),
        ("# Changelog\n", "got none"),
    ],
)
def test_changelog_speaks_of_the_version(text, problem):
    told = release_check.changelog_problems(text, "0.2.0")
    assert told == [] if problem is None else problem in told[0]


def test_changelog_speaks_of_a_core_that_changed():
    (told,) = release_check.changelog_problems(LOG, "0.2.0", core_changed=True)
    assert 'wanted a line "- Core: ..." about 0.2.0' in told
    log = LOG.replace("- Rows of zeros.\n", "- Core: launches on a torch without its allocator.\n")
    assert release_check.changelog_problems(log, "0.2.0", core_changed=True) == []


@pytest.mark.parametrize(
    ("old", "new", "breaking", "adding", "good"),
    [
        ("0.1.0", "0.1.1", False, False, True),
        ("0.1.0", "0.1.1", False, True, False),
        ("0.1.0", "0.2.0", True, True, True),
        ("0.1.3", "0.1.4", True, False, False),
        ("1.2.0", "1.3.0", True, False, False),
        ("1.2.0", "2.0.0", True, False, True),
        ("1.2.0", "1.3.0", False, True, True),
    ],
)
def test_version_step_fits_the_change(old, new, breaking, adding, good):
    versions = map(release_check.parse_version, (old, new))
    told = release_check.version_problems(*versions, ["x"] * breaking, ["y"] * adding)
    assert (told == []) is good


@pytest.fixture
def released(repository, monkeypatch):
    """norm 0.1.0 is tagged; returns a call that changes it and checks it again."""
    monkeypatch.setattr(workspace, "ROOT", repository)
    folder = repository / "packages/norm"
    module = folder / "src/fusewright/norm/__init__.py"
    module.write_text("def rms_norm(x): ...\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (
        ["init"],
        ["add", "."],
        [*identity, "commit", "-m", "a"],
        ["tag", "norm-v0.1.0"],
    ):
        release_check.git(*command)

    def change(version: str, code: str, tag: str | None = None, log: str = "") -> list[str]:
        project = (folder / "pyproject.toml").read_text().replace("0.1.0", version)
        (folder / "pyproject.toml").write_text(project)
        before = "## 0.1.0 - 2026-10-01\n\n- First.\n\n### Deprecated\n\n- `rms_norm`: none.\n"
        entry = f"## {version} - 2026-11-21\n\n- Changed.\n\n{log}\n"
        (folder / "CHANGELOG.md").write_text(entry + before * (version != "0.1.0"))
        module.write_text(code)
        return release_check.check(workspace.load(folder), tag)

    return change


def test_a_removed_function_wants_a_new_minor_version(released, capsys):
    assert "wanted at least version 0.2.0" in released("0.1.1", "def layer_norm(x): ...\n")[0]
    told = capsys.readouterr().out
    assert "norm-v0.1.1 against norm-v0.1.0: 1 breaking, 1 adding" in told
    assert "removed rms_norm: def (x)" in told
    assert "added layer_norm: def (x)" in told


OPERATION = "def layer_norm(x): ...\n"


def test_a_name_that_was_not_deprecated_stays():
    newest, older = "## 0.2.0 - 2026-11-21\n", "## 0.1.0 - 2026-10-01\n"
    deprecated = "\n### Deprecated\n\n- `rms_norm`, `RMSNorm`\n\n"
    gone = ["removed rms_norm: def (x)", "removed RMSNorm.reset: def ()", "changed scale: def (x)"]
    wanted = "under Deprecated of an earlier entry of CHANGELOG.md before it goes"
    assert release_check.deprecation_problems(newest + deprecated + older, gone) == [
        f"wanted `rms_norm` {wanted}",
        f"wanted `RMSNorm.reset` {wanted}",
    ]
    assert release_check.deprecation_problems(newest + older + deprecated, gone) == []


def test_what_became_slower_is_named_in_the_changelog(released, repository, capsys):
    header = "op,case,pass,provider,dtype,timing,ms,ms_p20,ms_p80\n"
    row = "rms_norm,rows=8,fwd,fusewright,bf16,graph,{0},{0},{0}\n"
    results = repository / "packages/norm/results"
    results.mkdir()
    file = results / "h200-torch2.11-triton3.6.csv"
    file.write_text(header + row.format(0.2))
    release_check.git("add", ".")
    release_check.git("-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-m", "b")
    release_check.git("tag", "-f", "norm-v0.1.0")
    file.rename(results / "h200-torch2.13-triton3.7.csv").write_text(header + row.format(0.3))
    (told,) = released("0.2.0", OPERATION)
    assert told.startswith("wanted `rms_norm` under Slower of CHANGELOG.md's newest entry")
    assert "rms_norm rows=8 fwd bf16 graph, h200: 0.2 ms, now 0.3, 1.50 of it" in told
    assert "1 times were measured at both, 1 of them moved" in capsys.readouterr().out
    assert released("0.2.0", OPERATION, log="### Slower\n\n- `rms_norm` of few rows.\n") == []


def test_a_good_release_passes_with_its_own_tag_alone(released):
    assert released("0.2.0", "def layer_norm(x): ...\n", "norm-v0.2.0") == []
    assert released("0.2.0", "", "norm-v0.2.1") == ["wanted the tag norm-v0.2.0, got norm-v0.2.1"]


def test_nothing_is_released_without_the_repositorys_address(released, repository):
    (repository / "pyproject.toml").write_text('[tool.fusewright]\nrepository = ""\n')
    (told,) = released("0.2.0", "def layer_norm(x): ...\n", "norm-v0.2.0")
    assert told == "wanted the repository's address in the root pyproject.toml, got none"


def test_a_released_version_is_not_released_again(released):
    again, step = released("0.1.0", "def rms_norm(x): ...\n")
    assert again == "norm-v0.1.0 is released already: raise the version"
    assert step == "wanted at least version 0.1.1 for these changes, got 0.1.0"
    _, gone, step = released("0.1.0", "")
    assert gone.startswith("wanted `rms_norm` under Deprecated")
    assert step == "wanted at least version 0.2.0 for these changes, got 0.1.0"


def test_git_failures_are_not_swallowed(repository, monkeypatch):
    monkeypatch.setattr(workspace, "ROOT", repository)
    with pytest.raises(subprocess.CalledProcessError):
        release_check.git("show", "norm-v0.1.0")
