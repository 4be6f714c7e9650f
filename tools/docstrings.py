"""Docstrings on the documentation site: roles become links, blocks and doctests code."""

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([\w.]+)`")
DIRECTIVE = re.compile(r"^ *\.\. code-block:: \w+\n\n?", flags=re.MULTILINE)
PAGE = re.compile(r"(?:``)?docs/(\w+)\.md(?:``)?")
DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", flags=re.MULTILINE | re.DOTALL)
# Functions that have the name of their module: griffe would take that for them.
NAMESAKES = {
    "ortholand.explain": "ortholand.optim.explain.explain",
    "ortholand.minimize": "ortholand.solve.minimize.minimize",
}


class Readable(Extension):
    """Writes docstrings as Markdown that MkDocs understands."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring:
            text = DIRECTIVE.sub("", obj.docstring.value)
            text = DOCTEST.sub(lambda example: f"```pycon\n{example[0]}\n```", text)
            text = PAGE.sub(r"[\1](../\1.md)", text)  # all of the reference is in api/
            obj.docstring.value = ROLE.sub(as_link, text)


def as_link(role: re.Match) -> str:
    """A link to what the reference shows; the name alone where it does not."""
    target = NAMESAKES.get(role[1], role[1])
    return f'<autoref optional identifier="{target}"><code>{role[1]}</code></autoref>'
