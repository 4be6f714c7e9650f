"""Orthogonal layers in a sharded model: FSDP2 under torchrun, with checkpoints that resume.

    torchrun --nproc-per-node 2 examples/torchrun_fsdp.py --out run
    torchrun --nproc-per-node 4 examples/torchrun_fsdp.py --out run --steps 400   # goes on

A network learns scikit-learn's digits; its layers are tall, square and wide matrices with
orthonormal columns or rows. ``fully_shard`` spreads each over the ranks by rows, and LandingAdam
steps it there: no rank ever holds all of a tall matrix, and none is decomposed.

If interrupted, by a key or by a rank that dies, it continues from the last checkpoint when started
again, on however many ranks there are then. Runs on CPUs (gloo) or GPUs (NCCL).

Needs scikit-learn: pip install . ./lab.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import ortholand as ol

BATCH = 64
TRAIN = 1500  # digits; the other 297 are for testing
WIDTH, DEPTH = 96, 3


class OrthogonalNet(nn.Module):
    """64 -> 96 (tall), three times 96 -> 96 (square), 96 -> 32 (wide), and a free head."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [64, *[WIDTH] * (DEPTH + 1), 32]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the ten digits."""
        hidden = images
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden) * 10


def build(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, ol.LandingAdam]:
    """The sharded model, on the manifold, and its optimizer."""
    torch.manual_seed(seed)  # the same weights on all ranks, of which each keeps its rows
    model = OrthogonalNet().to(mesh.device_type)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = ol.param_groups(model, orthogonal="layers.*", other_options={"weight_decay": 1e-3})
    ol.orthogonalize_(groups)
    return model, ol.LandingAdam(groups, lr=0.01, attraction="after")


def load_digits(device: str) -> tuple[Tensor, Tensor]:
    """The 1,797 images of 8 x 8 as rows, and their digits."""
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().to(device) / 8 - 1
    return images, torch.from_numpy(labels).long().to(device)


def batch_of(step: int) -> Tensor:
    """This rank's part of the batch of a step: the same batch whatever the number of ranks."""
    chosen = torch.randint(TRAIN, (BATCH,), generator=torch.Generator().manual_seed(step))
    return chosen.chunk(dist.get_world_size())[dist.get_rank()]


def backward(model: nn.Module, images: Tensor, labels: Tensor, step: int) -> Tensor:
    """Gradients of a step; the loss on this rank's part of the batch."""
    chosen = batch_of(step)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
    loss.backward()
    return loss.detach()


# --- checkpoints


def save(model: nn.Module, optimizer: ol.LandingAdam, step: int, folder: Path) -> None:
    """Save weights and state after a step; each rank writes what it has.

    Under a temporary name until all have: what has the final name is whole.
    """
    weights, states = get_state_dict(model, optimizer)
    unfinished = folder / f"unfinished-{step:06d}"
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{step:06d}")
    dist.barrier()


def resume(model: nn.Module, optimizer: ol.LandingAdam, folder: Path) -> int:
    """Load the last checkpoint, if there is one, saved on however many ranks; its step, or 0."""
    saved = sorted(folder.glob("step-*"))
    if not saved:
        return 0
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return int(saved[-1].name.removeprefix("step-"))


# --- what is shown


def show_progress(step: int, steps: int, loss: Tensor, optimizer: ol.LandingAdam) -> None:
    """A line that is written over, by rank 0; all ranks take part in the numbers."""
    mean = loss.clone()
    dist.all_reduce(mean)
    error = ol.orthogonality_error(optimizer)
    if dist.get_rank() == 0:
        mean /= dist.get_world_size()
        done = "#" * (30 * step // steps)
        text = f"\r[{done:<30}] step {step}/{steps}  loss {mean:.4f}  |X'X - I| {error:.1e}"
        print(text, end="\n" if step == steps else "", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Of the test digits. All ranks must call it."""
    scores = model(images[TRAIN:])
    return (scores.argmax(1) == labels[TRAIN:]).float().mean().item()


def traffic(counter: CommDebugMode) -> str:
    """The collectives that were counted, by name."""
    counts = counter.get_comm_counts()
    return ", ".join(f"{number} x {str(op).split('.')[-1]}" for op, number in counts.items())


# --- the run


def run(steps: int, every: int, out: Path, seed: int) -> None:
    """Train from the last checkpoint, or from the start, to the given step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model, optimizer = build(mesh, seed)
    images, labels = load_digits(device)
    first = resume(model, optimizer, out)
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        print(f"{dist.get_world_size()} ranks, from step {first} to {steps}", flush=True)
    for step in range(first + 1, steps + 1):
        loss = backward(model, images, labels, step)
        optimizer.step()
        if step % 10 == 0 or step == steps:
            show_progress(step, steps, loss, optimizer)
        if step % every == 0 or step == steps:
            save(model, optimizer, step, out)
    correct = accuracy(model, images, labels)
    backward(model, images, labels, steps + 1)
    with CommDebugMode() as counter:
        optimizer.step()  # is not saved
    if dist.get_rank() == 0:
        print(f"test accuracy {correct:.1%}; skipped steps: {optimizer.skipped_steps()}")
        print(f"collectives of an optimizer step: {traffic(counter)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example on this rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="last step of the training")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("torchrun_fsdp"), help="checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 examples/torchrun_fsdp.py")
    if options.steps < 1 or options.every < 1:
        parser.error(
            f"--steps and --every must be at least 1, got {options.steps} and {options.every}."
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        run(options.steps, options.every, options.out, options.seed)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
