"""No function meets a defect of CPython 3.12: where a comprehension takes a global's name, a later
comprehension of the same function that reads the global finds no value.

    results = [make() for make in allocators]
    copies = [make(x) for x in results]  # UnboundLocalError: ``make`` is the module's own
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import check_text

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
# A generator expression keeps a scope of its own.
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp


def own_nodes(node: ast.AST, without: tuple[type, ...]) -> Iterator[ast.AST]:
    """What a node holds, but not what lies inside nodes of some types."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, without):
            yield from own_nodes(child, without)


def bound(comprehension: ast.AST) -> set[str]:
    targets = [part.target for part in comprehension.generators]
    return {x.id for y in targets for x in ast.walk(y) if isinstance(x, ast.Name)}


def read(node: ast.AST) -> set[str]:
    """The names that a node reads and does not bind itself."""
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    names = set().union(*map(read, ast.iter_child_nodes(node)))
    return names - bound(node) if isinstance(node, (*COMPREHENSIONS, ast.GeneratorExp)) else names


def module_names(tree: ast.Module) -> set[str]:
    """The names that a module's own lines define, import or assign."""
    names = set()
    for node in own_nodes(tree, (*FUNCTIONS, ast.ClassDef)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(x.asname or x.name).partition(".")[0] for x in node.names}
        elif isinstance(node, (*FUNCTIONS[:2], ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def lost_names(source: str) -> list[tuple[int, str]]:
    """Line and name of the globals that a comprehension would not find."""
    tree, found = ast.parse(source), []
    known = module_names(tree)
    for function in ast.walk(tree):
        if not isinstance(function, FUNCTIONS):
            continue
        own = [*own_nodes(function, FUNCTIONS)]
        some = [x for x in own if isinstance(x, COMPREHENSIONS)]
        if len(some) < 2:
            continue
        targets = {y for x in some for part in x.generators for y in ast.walk(part.target)}
        stored = [x for x in own if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
        local = {x.id for x in stored if x not in targets}
        local |= {x.arg for x in ast.walk(function.args) if isinstance(x, ast.arg)}
        for one in own_nodes(function, (*FUNCTIONS, *COMPREHENSIONS)):
            if not isinstance(one, COMPREHENSIONS):
                continue
            hidden = set().union(*(bound(other) for other in some if other is not one)) - local
            found += [(one.lineno, name) for name in sorted(hidden & read(one) & known)]
    return found


def test_a_hidden_global_is_found():
    def lost(body):
        return lost_names(f"g = abs\ndef f(xs):\n    {body}")

    assert lost("a = [g() for g in xs]; return [g(x) for x in xs]") == [(3, "g")]
    assert lost("return [g(y) for y in [g for g in xs]]") == [(3, "g")]
    assert lost("return [g for g in xs], [g for g in xs], g") == []
    assert lost("return list(g for g in xs), [g(x) for x in xs]") == []
    assert lost("g = max; return [g for g in xs], [g(x) for x in xs]") == []


def test_no_comprehension_hides_a_global_from_another():
    files = [path for path in check_text.files() if path.suffix == ".py"]
    assert len(files) > 400
    lost = {str(path): lost_names(path.read_text()) for path in files if not path.is_symlink()}
    assert {path: names for path, names in lost.items() if names} == {}
