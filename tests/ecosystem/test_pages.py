"""The code of the pages that need other libraries runs."""

import re
from pathlib import Path

import pytest

for package in ("lightning", "accelerate", "transformers", "hydra"):
    pytest.importorskip(package, reason="needs pip install 'ortholand[ecosystem]'")

PAGE = Path(__file__).parents[2] / "docs" / "training_stacks.md"

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore"),  # advice of the frameworks on tiny tasks
]


def test_the_page_runs_from_top_to_bottom():
    import ortholand as ol

    namespace = {"__name__": "page"}
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
        if isinstance(namespace.get("optimizer"), ol.LandingAdam):
            assert ol.orthogonality_error(namespace["optimizer"]) < 1e-3
    assert namespace["optimizer"].param_groups[0]["betas"] == (0.9, 0.99)
    assert ol.orthogonality_error(namespace["module"].optimizers()) < 1e-3
    assert namespace["trainer"].global_step == 24
    assert namespace["trainer"].callback_metrics["orthogonality_error"] < 1e-3
    assert ol.orthogonality_error(namespace["hugging_face"].optimizer) < 1e-3


def test_the_recipe_for_peft_runs():
    pytest.importorskip("peft", reason="needs pip install 'ortholand[ecosystem]'")
    page = PAGE.parent / "recipes" / "peft.md"
    (block,) = re.findall(r"^```py\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    exec(compile(block, str(page), "exec"), {"__name__": "page"})
