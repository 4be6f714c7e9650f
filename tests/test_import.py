"""What `import ortholand` brings in, and that the page of names is true."""

import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ortholand as ol

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
HEAVY = {"matplotlib", "rich", "scipy", "sklearn", "typer"}
# For other modules the page lists only what users call or extend.
COMPLETE = {f"ortholand.{part}" for part in ("geometry", "nn", "optim", "solve")}
COMPLETE.add("ortholand_lab.problems")


def names_in(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def names_by_module() -> dict[str, list[str]]:
    rows = re.findall(r"^\| `(ortholand[\w.]+)` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    return {module: names_in(names) for module, names in rows}


def test_the_library_imports_neither_the_laboratory_nor_anything_that_draws_or_prints():
    code = "import sys, ortholand; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "ortholand.optim" in loaded
    assert not {module.split(".")[0] for module in loaded} & HEAVY
    assert "ortholand_lab" not in loaded
    assert "torch.distributed.tensor" not in loaded  # that waits for a DTensor
    assert "ortholand.sharding.manifold" not in loaded


MANIFOLDS = {  # where the blocks of a problem may live: one idea, several names
    *("Stiefel", "Grassmann", "Rotations", "Sphere", "Euclidean"),
    *("GeneralizedStiefel", "Covariance", "Constraint"),
}
PARTS_OF_COSTS = {"L1", "L21", "Box", "Nonnegative", "Prox"}


def test_the_top_level_is_small_sorted_and_true():
    # As ruff sorts it: constants, classes, functions.
    order = sorted(ol.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert ol.__all__ == order
    assert len(ol.__all__) == len(set(ol.__all__))
    assert len(set(ol.__all__) - MANIFOLDS - PARTS_OF_COSTS) <= 25
    modules = {name for name in vars(ol) if f"ortholand.{name}" in sys.modules}
    public = {name for name in vars(ol) if not name.startswith("_")}
    assert public - modules - {"PackageNotFoundError", "version"} == set(ol.__all__)


def test_the_page_lists_the_whole_top_level():
    table = PAGE.split("Import the rest")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    listed = [name for row in rows for name in names_in(row)]
    assert sorted(listed) == sorted(ol.__all__)


@pytest.mark.parametrize("module", names_by_module())
def test_names_are_where_the_page_says(module):
    host = module.rpartition(".")[2]
    if host in ("lightning", "peft", "transformers"):
        pytest.importorskip(host, reason="needs pip install 'ortholand[ecosystem]'")
    found, names = importlib.import_module(module), names_by_module()[module]
    assert names
    for name in names:
        assert hasattr(found, name), name
    if module in COMPLETE:
        assert set(names) == set(found.__all__)


def test_no_chain_of_imports_in_the_solver_has_more_than_8_modules():
    grimp = pytest.importorskip("grimp", reason="comes with import-linter")
    graph = grimp.build_graph("ortholand")

    @functools.cache
    def longest(module: str) -> tuple[str, ...]:
        below = graph.find_modules_directly_imported_by(module) & solver
        return (module, *max(map(longest, below), key=len, default=()))

    solver = {name for name in graph.modules if name.startswith("ortholand.solve")}
    chain = max(map(longest, solver), key=len)
    assert len(chain) <= 8, chain


def test_every_name_of_the_top_level_also_has_a_module():
    everywhere = {name for names in names_by_module().values() for name in names}
    assert set(ol.__all__) <= everywhere
