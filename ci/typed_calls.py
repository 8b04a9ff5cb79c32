"""Whether a call of a part's modules has the type of their ``forward``, to mypy and basedpyright.

    python ci/typed_calls.py packages/norm

Torch's own ``__call__`` returns Any, after which nothing is checked any more. So a module here says
``if TYPE_CHECKING: __call__ = forward``, and both checkers are asked for both.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import workspace

REVEALED = re.compile(r"(?:Revealed type is|Type of \"[\w.]+\" is) \"(.*)\"")
CHECKERS = (["mypy", "--hide-error-context"], ["basedpyright"])


def is_module(node: ast.AST) -> bool:
    """A class with a ``forward`` of its objects; that of an autograd.Function is static."""
    methods = node.body if isinstance(node, ast.ClassDef) and node.bases else []
    return any(
        isinstance(each, ast.FunctionDef)
        and each.name == "forward"
        and [argument.arg for argument in each.args.args[:1]] == ["self"]
        for each in methods
    )


def modules(part: workspace.Project) -> list[str]:
    """The modules of a part by where they are defined, such as
    ``fusewright.norm.row_norm.rms_norm.RMSNorm``.
    """
    found = []
    for path in sorted(part.import_folder.rglob("*.py")):
        place = ".".join(path.relative_to(part.source).with_suffix("").parts)
        nodes = ast.parse(path.read_text()).body
        found += [f"{place}.{node.name}" for node in nodes if is_module(node)]
    return found


def program(names: list[str]) -> str:
    """Asks for the types of ``__call__`` and of ``forward``, in turn."""
    lines = [f"import {home}" for home in sorted({name.rpartition(".")[0] for name in names})]
    for number, name in enumerate(names):
        lines += [f"def of_{number}(module: {name}) -> None:"]
        lines += [f"    reveal_type(module.{each})" for each in ("__call__", "forward")]
    return "\n".join([*lines, ""])


def problems(told: str, names: list[str]) -> list[str]:
    """Of which modules a checker tells two types; none told is an error.

    Raises:
        ValueError: the checker did not answer both questions about each.
    """
    types = REVEALED.findall(told)
    if len(types) != 2 * len(names):
        raise ValueError(f"wanted the types of {2 * len(names)} methods, got {told}")
    pairs = zip(names, types[::2], types[1::2], strict=True)
    return [f"{name} is called as {call}, wanted {own}" for name, call, own in pairs if call != own]


def main() -> int:
    part = workspace.load(Path(sys.argv[1]))
    names = modules(part)
    if not names:
        return 0
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "calls.py")
        file.write_text(program(names))
        for checker in CHECKERS:
            done = subprocess.run([*checker, str(file)], capture_output=True, text=True)
            found += [f"{checker[0]}: {line}" for line in problems(done.stdout, names)]
    print(*found, f"{part.import_name}: calls of {len(names)} modules", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
