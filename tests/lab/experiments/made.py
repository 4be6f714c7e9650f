"""What tests of experiments share: records made by hand, a silent watcher, two trials."""

from dataclasses import asdict, replace

import torch

from ortholand_lab.study.records import Record, Request, Result, RunOptions


class Quiet:
    """Shows no progress."""

    def start(self, *_): ...
    def advance(self, *_): ...
    def unit_done(self, *_): ...


def record(study, task, series, preset="paper"):
    request = Request(study, 1, "unit", RunOptions(preset, 0, "cpu", 1), asdict(task), {})
    return Record(request, Result(series, {}), {}, 0.0, "")


def turns(seconds, repetitions):
    """The series of a timing in which runs take turns: seconds of each."""
    times = [*enumerate(seconds)] * repetitions
    return dict(zip(("run", "seconds"), zip(*times, strict=True), strict=True))


def trials_are_other_networks_with_other_batches(start, run, context):
    one, again, other = (start(replace(run, trial=i), context) for i in (1, 1, 2))
    for training, same in ((again, True), (other, False)):
        weights = zip(one.trainee.weights(), training.trainee.weights(), strict=True)
        assert all(torch.equal(W, V) for W, V in weights) == same
    first, second, third = (next(t.batches)[0] for t in (one, again, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
