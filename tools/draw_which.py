"""Draws docs/figures/which.png: what lr does to each optimizer and attraction.

    .venv/bin/python tools/draw_which.py        (half a minute; needs the laboratory)

The digits of scikit-learn, 8 x 8 pixels, read by a network with two orthogonal layers.
"""

import math
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import ortholand as ol
from ortholand_lab.study.figures import house_style

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "which.png"
RATES = [10 ** (k / 2) for k in range(-8, 3)]  # 1e-4 to 10
SEEDS = range(3)
# label: optimizer, attraction, colour, line
METHODS = {
    "LandingSGD, coupled": (ol.LandingSGD, "coupled", "#0072B2", "-"),
    "LandingSGD, after": (ol.LandingSGD, "after", "#0072B2", "--"),
    "LandingAdam, after": (ol.LandingAdam, "after", "#D55E00", "--"),
    "LandingMuon, after": (ol.LandingMuon, "after", "#009E73", "--"),
}


def train(optimizer_type: type, attraction: str, lr: float, seed: int, steps: int) -> list[float]:
    """Loss over all digits, and orthogonality error, after some steps at a constant lr.

    Layers without constraint are not trained: what is seen is the constrained ones' lr.
    """
    torch.manual_seed(seed)
    pixels, labels = (torch.from_numpy(x) for x in load_digits(return_X_y=True))
    pixels = pixels.float() / 8 - 1
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    groups = ol.orthogonalize_(ol.param_groups(model, orthogonal=["0.weight", "2.weight"]))
    optimizer = optimizer_type([groups[0]], lr=lr, attraction=attraction)
    for _ in range(steps):
        batch = torch.randint(len(labels), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(pixels), labels).item()
    return [loss, ol.orthogonality_error(optimizer)]


def median(values: list[float]) -> float:
    """NaN, of a run that has exploded, counts as the largest."""
    return sorted(values, key=lambda x: math.inf if math.isnan(x) else x)[len(values) // 2]


def draw(steps: int = 300) -> Figure:
    """Loss and error against lr, for all methods."""
    with house_style():
        figure = Figure(figsize=(8, 3.4))
        losses, errors = figure.subplots(1, 2)
        for label, (optimizer, attraction, colour, line) in METHODS.items():
            runs = [[train(optimizer, attraction, lr, s, steps) for s in SEEDS] for lr in RATES]
            look = dict(label=label, color=colour, linestyle=line, marker=".")
            losses.plot(RATES, [median([run[0] for run in seeds]) for seeds in runs], **look)
            errors.plot(RATES, [median([run[1] for run in seeds]) for seeds in runs], **look)
        losses.set(xscale="log", xlabel="lr", ylabel=f"loss after {steps} steps", ylim=(0, 2.5))
        errors.set(xscale="log", yscale="log", xlabel="lr", ylabel="orthogonality error")
        handles, labels = losses.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=9)
    return figure


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(int(sys.argv[1]) if len(sys.argv) > 1 else 300).savefig(FIGURE, dpi=150)
