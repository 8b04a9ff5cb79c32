#!/usr/bin/env -S python -m nox -f
"""The only task runner of this repository; ``nox -l`` lists what it can do.

Packages are discovered, sessions are parametrized over them: ``nox -s tests`` runs everything,
``nox -s "tests(norm)"`` one package. What follows ``--`` is handed on to the session's tool.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "ci"))

import new_package  # noqa: E402
import readme  # noqa: E402
import workspace  # noqa: E402

nox.needs_version = ">=2025.2.9"
# pip, because it follows the user's configuration: a machine may have torch in a local folder.
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True

# Where a machine forbids bytecode files, each process that imports torch compiles a thousand files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

CONSTRAINED = ("-c", "ci/constraints/tested.txt")
# The newest, and the newest that transformers 5.17 takes.
KERNELS = "kernels==0.17.2", "kernels==0.16.2"
CORE = "core"
RESULTS = ROOT / ".nox/results"
PYTEST = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-m", workspace.QUICK_TIER)
# A process a core; the tests of a file may go to several.
SPREAD = ("-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")
# numpy's threads, which the interpreter multiplies matrices with, would wait for one another's.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# The CPU's own kernels and those of older ones: torch's, oneDNN's, MKL's, and those of numpy's
# OpenBLAS, which the interpreter multiplies matrices with.
CPUS = {
    "own": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "default": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
}
# Where the CPU lacks it, torch falls back: the tests would be the same ones again.
SERVED_BY = (
    "import torch; found = torch.backends.cpu.get_cpu_capability(); assert found == {!r}, found"
)

# The wheels that this run of nox has built, by the folders of their parts and by pip's options.
BUILT: dict[tuple[str, tuple[str, ...]], Path] = {}
PACKAGES = workspace.packages()
PARTS = [nox.param(p, id=p.name) for p in PACKAGES + workspace.integration()]
# nox notes the argument's name in the parameters themselves, so that all sessions call it alike.
each_package = nox.parametrize("part", PARTS[: len(PACKAGES)])
each_part = nox.parametrize("part", PARTS)
# What `nox -s new` lays out has to pass like any other package.
NEW = nox.param(None, id="new")
each_part_and_new = nox.parametrize("part", [*PARTS, NEW])
each_part_new_and_core = nox.parametrize("part", [*PARTS, NEW, nox.param(CORE, id="core")])


def label(session: nox.Session) -> str:
    """``tests(norm)`` as a file name: ``tests-norm``."""
    return session.name.replace("(", "-").rstrip(")")


def empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def laid_out(session: nox.Session) -> workspace.Project:
    """A new package, in a folder of the session's own."""
    return new_package.lay_out("example", empty(ROOT / ".nox" / f"laid-out-{label(session)}"))


def group(name: str) -> list[str]:
    """A dependency group of the root pyproject.toml."""
    return nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), name)


def build_wheels(
    session: nox.Session, projects: list[workspace.Project], *options: str
) -> list[str]:
    """Builds wheels into an empty folder below dist/ and holds each against the wheel contract.

    What an earlier session of the same run has built likewise is taken from there.
    """
    dist = empty(ROOT / "dist" / label(session))
    dist.mkdir(parents=True)
    folders = [str(project.folder) for project in projects]
    known = {folder: BUILT.get((folder, options)) for folder in folders}
    for wheel in filter(None, known.values()):
        shutil.copy2(wheel, dist)
    if missing := [folder for folder in folders if known[folder] is None]:
        command = ("python", "-m", "pip", "wheel", "-q", "--no-deps", *options)
        session.run(*command, "-w", str(dist), *missing)
    BUILT.update({(str(each.folder), options): dist / each.wheel for each in projects})
    public = [folder for folder in folders if folder != str(workspace.kit().folder)]
    session.run("python", "ci/check_wheel.py", str(dist), *public)
    return [str(path) for path in sorted(dist.glob("*.whl"))]


def install_isolated(session: nox.Session, part: workspace.Project) -> None:
    """The built wheels of a part and of the testkit, over the shared layer of everybody else's."""
    session.run("python", "ci/third_party.py", ".nox/third-party")
    projects = [*workspace.needed_for(part), workspace.kit()]
    session.install("--no-deps", *build_wheels(session, projects, "--no-build-isolation"))
    session.run("python", "-m", "pip", "check")
    session.run("python", "ci/check_env.py", str(part.folder))


def install_alone(session: nox.Session, part: workspace.Project, files: list[str]) -> None:
    """A part's wheels with all that they want, imported by themselves; then what its tests take."""
    session.install(*files, *CONSTRAINED)
    session.run("python", "ci/check_env.py", str(part.folder), "--alone")
    session.install("./ci/testkit", *part.groups["test"], *CONSTRAINED)


def run_tests(
    session: nox.Session, folder: Path, cpu: str = "own", options: Sequence[str] | None = None
) -> None:
    """Tests of a folder, from an empty one, so that only the installed wheel can be imported."""
    name = label(session) if cpu == "own" else f"{label(session)}-{cpu}"
    junit, env = RESULTS / f"{name}.xml", {**ONE_THREAD, **CPUS[cpu]}
    with session.chdir(session.create_tmp()):
        if "ATEN_CPU_CAPABILITY" in env:
            capability = env["ATEN_CPU_CAPABILITY"].upper()
            session.run("python", "-c", SERVED_BY.format(capability), env=env)
        command = ("python", "-m", "pytest", str(folder), *PYTEST, *SPREAD, "--durations=5")
        more = session.posargs if options is None else options
        session.run(*command, f"--junitxml={junit}", *more, env=env)


@nox.session
@each_part_new_and_core
def tests(session: nox.Session, part: workspace.Project | str | None) -> None:
    """Build a part's wheel, hold it to its contract, install it alone of ours, run its tests."""
    # The core is tested as a part of a new package's wheel.
    core, part = part == CORE, part if isinstance(part, workspace.Project) else laid_out(session)
    install_isolated(session, part)
    run_tests(session, ROOT / "ci/tests/core" if core else part.tests)


@nox.session(default=False)
@each_part
def cpus(session: nox.Session, part: workspace.Project) -> None:
    """A part's tests with the kernels of this CPU, of one with AVX2, and of one without."""
    install_isolated(session, part)
    for cpu in CPUS:
        run_tests(session, part.tests, cpu)


@nox.session(default=False, venv_backend="none")
def full(session: nox.Session) -> None:
    """Queue what the quick tier leaves out: all cases, GPUs, mutations, wheels, versions, CPUs."""
    session.notify("typing")
    session.notify("mutations")
    for part in [*PACKAGES, *workspace.integration()]:
        session.notify(f"tests({part.name})", ["-m", "not gpu"])
        for name in ("wheels", "minimums", "newest", "cpus"):
            session.notify(f"{name}({part.name})", [])


@nox.session
def lint(session: nox.Session) -> None:
    """Style, spelling, the README's tables, and the tests of the scripts in ci/."""
    session.install(*group("lint"), *CONSTRAINED)
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("codespell")
    session.run("python", "ci/check_text.py")
    session.run("python", "ci/readme.py", "--check")
    junit = RESULTS / "lint.xml"
    command = ("python", "-m", "pytest", "ci/tests", "--ignore=ci/tests/core", *SPREAD)
    session.run(*command, f"--junitxml={junit}", *session.posargs)


@nox.session
@each_part_and_new
def typing(session: nox.Session, part: workspace.Project | None) -> None:
    """mypy on a part's source; a fully typed public surface; calls typed as their forward."""
    part = part or laid_out(session)
    install_isolated(session, part)
    session.install(*group("typing"), *CONSTRAINED)
    source = str(part.source)
    session.run("mypy", source, *session.posargs, env={"MYPYPATH": source})
    if part.is_package:
        session.run("python", "ci/public_types.py", str(part.folder))
    session.run("python", "ci/typed_calls.py", str(part.folder))


@nox.session(default=False)
def torchtitan(session: nox.Session) -> None:
    """The models in torchtitan's program, which wants other versions than those of all others."""
    (models,) = workspace.integration()
    install_isolated(session, models)
    session.install("-c", "ci/constraints/torchtitan.txt", "torchtitan")
    tests = models.tests / "test_torchtitan.py"
    with session.chdir(session.create_tmp()):
        session.run("python", "-m", "pytest", str(tests), *PYTEST, *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def transformers(session: nox.Session) -> None:
    """Models of transformers on our kernels; it wants other versions than those of all others."""
    (models,) = workspace.integration()
    install_isolated(session, models)
    constrained = ("-c", "ci/constraints/transformers.txt")
    newest, taken = KERNELS
    session.install(*constrained, "transformers", newest)

    def run(*names: str) -> None:
        tests = [str(models.tests / name) for name in names]
        with session.chdir(session.create_tmp()):
            command = ("python", "-m", "pytest", *tests, *PYTEST, *SPREAD, *session.posargs)
            session.run(*command, env=ONE_THREAD)

    run("test_patch.py", "test_bench_llama.py", "test_hub.py")
    session.install(*constrained, taken)
    run("test_hub.py")


@nox.session(default=False)
@each_package
def hub(session: nox.Session, part: workspace.Project) -> None:
    """Write what the kernels library loads of a package into dist/hub-NAME."""
    folder = empty(ROOT / "dist" / label(session))
    session.run("python", "ci/hub.py", part.name, str(folder), *session.posargs)


@nox.session(default=False)
def mutations(session: nox.Session) -> None:
    """Changes of the source that once survived the tests, each of which has to fail one."""
    session.run("python", "ci/third_party.py", ".nox/third-party")
    session.run("python", "ci/mutations.py", *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small TransformerNP on digits, a TitanMAC and a HybridLM on Python's own sources."""
    (models,) = workspace.integration()
    install_isolated(session, models)
    if session.posargs:
        session.run("fusewright-train", *session.posargs)
        return
    # Fewer steps than a preset's own: together within six minutes on two cores.
    session.run("fusewright-train", "transformer-np", "--steps", "700")
    session.run("fusewright-train", "titan-mac", "--steps", "520", "--margin", "0.15")
    session.run("fusewright-train", "hybrid", "--steps", "370", "--margin", "0.15")


@nox.session(default=False)
@each_package
def bench(session: nox.Session, part: workspace.Project) -> None:
    """A package's benchmarks against the peers that are installed; writes its result files."""
    install_isolated(session, part)
    session.run(
        "python", "ci/on_gpu.py", part.name, "--bench", "--installed", "--", *session.posargs
    )


@nox.session(default=False)
@each_part
def gpu(session: nox.Session, part: workspace.Project) -> None:
    """A part's tests marked gpu; an error where none could be executed."""
    install_isolated(session, part)
    session.run(
        "python", "ci/on_gpu.py", part.name, "--tests", "--installed", "--", *session.posargs
    )


@nox.session(default=False)
@each_part
def wheels(session: nox.Session, part: workspace.Project) -> None:
    """A part's wheels alone in a fully fresh environment: imports first, then its tests."""
    install_alone(session, part, build_wheels(session, workspace.needed_for(part)))
    run_tests(session, part.tests)


@nox.session(default=False)
@each_package
def build(session: nox.Session, part: workspace.Project) -> None:
    """Build what a release uploads, the wheel from the sdist, and test that wheel alone."""
    session.install(*group("release"), *CONSTRAINED)
    staged, dist = (empty(ROOT / folder / label(session)) for folder in (".nox/staged", "dist"))
    session.run("python", "ci/release_files.py", part.name, str(staged), *session.posargs)
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), str(staged))
    session.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    session.run("python", "ci/check_wheel.py", str(dist), str(part.folder))
    install_alone(session, part, [str(path) for path in dist.glob("*.whl")])
    run_tests(session, part.tests, options=())


@nox.session(default=False)
def wheelhouse(session: nox.Session) -> None:
    """Build all wheels into dist/wheelhouse; install each from there, by name and alone."""
    layer, parts = ".nox/third-party", [*PACKAGES, *workspace.integration()]
    session.run("python", "ci/third_party.py", layer)
    build_wheels(session, parts, "--no-build-isolation")
    for part in parts:
        alone = Path(session.create_tmp(), part.name)
        session.run("python", "-m", "venv", "--without-pip", "--clear", str(alone))
        python = sysconfig.get_path("scripts", "venv", {"base": str(alone)}) + "/python"
        session.run(python, "ci/third_party.py", layer, external=True)
        pip = ("python", "-m", "pip", "--python", python, "install", "-q", "--no-index")
        session.run(*pip, "--find-links", readme.WHEELHOUSE, part.distribution)
        check = ("ci/check_env.py", str(part.folder), "--alone", "--served")
        session.run(python, *check, external=True)


@nox.session(default=False)
@each_part
def minimums(session: nox.Session, part: workspace.Project) -> None:
    """A part's tests on the lowest versions that its metadata promises."""
    floors = Path(session.create_tmp()) / "floors.txt"
    text = session.run("python", "ci/minimums.py", part.name, silent=True)
    floors.write_text(text)
    projects = [*workspace.needed_for(part), workspace.kit()]
    session.install("-r", str(floors), "-c", str(floors), *build_wheels(session, projects))
    session.run("python", "ci/check_env.py", str(part.folder))
    run_tests(session, part.tests)


@nox.session(default=False)
@each_part
def newest(session: nox.Session, part: workspace.Project) -> None:
    """A part's tests on the newest versions that pip resolves, without constraints."""
    projects = [*workspace.needed_for(part), workspace.kit()]
    session.install(*build_wheels(session, projects), *part.groups["test"])
    session.run("python", "ci/check_env.py", str(part.folder))
    session.run("python", "-m", "pip", "list")
    run_tests(session, part.tests)


@nox.session(default=False)
@each_package
def release_check(session: nox.Session, part: workspace.Project) -> None:
    """Tag, changelog and public API of a package against its last release."""
    session.run("python", "ci/release_check.py", part.name, *session.posargs)


@nox.session(default=False, venv_backend="none")
def new(session: nox.Session) -> None:
    """Lay out a new package: nox -s new -- NAME."""
    session.run(sys.executable, "ci/new_package.py", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation, strictly."""
    session.install(*group("docs"), *CONSTRAINED)
    session.run("mkdocs", "build", "--strict", "--site-dir", ".nox/site", *session.posargs)
    session.run("python", "ci/check_site.py", ".nox/site")
