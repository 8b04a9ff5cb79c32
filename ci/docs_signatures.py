"""An extension of griffe, which reads the sources for the reference pages.

Constructors of named tuples have their fields as parameters; what a constructor's docstring says
for ``help`` alone is left out; names that docstrings refer to are code, without their roles.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# Where torch's own would be shown to who asks for help.
FOR_HELP = "Take the arguments that the class names."

ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([^`]+)`")
# Several attributes on a line: griffe takes the last name for a type.
UNBROKEN = ",\N{NO-BREAK SPACE}"
SEVERAL = re.compile(r"^( +\w+(?:, \w+)+)(?=: )", re.M)


class Reading(griffe.Extension):
    """What the docstrings and signatures of this repository mean."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            if "\nAttributes:\n" in text:
                text = SEVERAL.sub(lambda names: names[1].replace(", ", UNBROKEN), text)
            obj.docstring.value = text

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        init = cls.members.get("__init__")
        if init is None and any(str(base) == "NamedTuple" for base in cls.bases):
            cls.set_member("__init__", constructor(cls))
        elif init is not None and init.docstring and init.docstring.value == FOR_HELP:
            init.docstring = None


def constructor(cls: griffe.Class) -> griffe.Function:
    """That of a named tuple: each field by its place or its name."""
    kind = griffe.ParameterKind.positional_or_keyword
    fields = [
        griffe.Parameter(name, annotation=each.annotation, kind=kind, default=each.value)
        for name, each in cls.members.items()
        if each.is_attribute and each.annotation is not None
    ]
    parameters = griffe.Parameters(griffe.Parameter("self", kind=kind), *fields)
    return griffe.Function("__init__", parameters=parameters, returns="None")
