from dataclasses import replace

import pytest
import torch

from ortholand_lab.datasets import Dataset, Source
from ortholand_lab.study.records import Records, Store
from ortholand_lab.study.runner import collect, request_of, run_study, steps_to_do
from ortholand_lab.study.spec import Unit, Verdict


def numbers(run):
    return {name: record.result for name, record in run.records.items()}


def test_what_is_recorded_is_not_run_again(toy, options, store, watcher):
    experiment = toy.experiment()
    first = run_study(experiment, options, store, watcher)
    assert toy.ran == [1, 2, 3]
    assert not first.missing
    second = run_study(experiment, options, store, watcher)
    assert toy.ran == [1, 2, 3]
    assert numbers(second) == numbers(first)
    assert set(watcher.outcomes.values()) == {"recorded already"}
    assert watcher.done == watcher.total == 9  # in the first run: nothing was left to do


def test_an_interrupted_run_resumes_and_ends_with_the_same_numbers(
    toy, options, store, watcher, tmp_path
):
    experiment = toy.experiment()
    toy.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        run_study(experiment, options, store, watcher)
    toy.interrupt_at = None
    resumed = run_study(experiment, options, store, watcher)
    assert toy.ran == [1, 2, 3]
    whole = run_study(experiment, options, replace(store, root=tmp_path / "other"), watcher)
    assert numbers(resumed) == numbers(whole)


def test_a_damaged_record_is_redone(toy, options, store, watcher):
    experiment = toy.experiment()
    whole = run_study(experiment, options, store, watcher)
    path = store.path(request_of(experiment, experiment.units("quick")[1], options))
    path.write_bytes(path.read_bytes()[:-20])
    store = Store(store.root)  # each file is read once
    assert collect(experiment, options, store).missing.keys() == {"power-2"}
    again = run_study(experiment, options, store, watcher)
    assert toy.ran == [1, 2, 3, 2]
    assert "damaged" in watcher.outcomes["power-2"]
    assert numbers(again) == numbers(whole)


def test_other_settings_and_revisions_are_redone(toy, options, store, watcher):
    run_study(toy.experiment(), options, store, watcher)
    longer = toy.experiment(settings={"quick": type(toy.experiment().settings["quick"])(4)})
    run = run_study(longer, options, store, watcher)
    assert len(run.records["power-1"].series("y")) == 4
    run_study(replace(longer, revision=2), options, store, watcher)
    assert toy.ran == 3 * [1, 2, 3]


def test_a_unit_runs_with_the_threads_asked_for(toy, options, store, watcher):
    before = torch.get_num_threads()
    run = run_study(toy.experiment(), replace(options, threads=before + 1), store, watcher)
    assert run.records["power-1"].machine["threads"] == before + 1
    assert torch.get_num_threads() == before


def test_a_claim_without_its_record_is_not_decided(toy, options, store, watcher):
    toy.interrupt_at = 3
    with pytest.raises(KeyboardInterrupt):
        run_study(toy.experiment(), options, store, watcher)
    [(_, finding)] = collect(toy.experiment(), options, store).findings()
    assert finding.verdict is Verdict.OPEN
    assert "power-3" in finding.measured


def test_a_mistake_in_a_claim_is_not_hidden(toy):
    claim = replace(toy.experiment().claims[0], check=lambda _: {}["oops"])
    with pytest.raises(KeyError):
        claim.judge(Records({}))


# An experiment with data.


class Shelf:
    """A data set that counts how often it is read."""

    def __init__(self, identity="MNIST") -> None:
        empty = torch.zeros(0)
        self.data = Dataset("MNIST", empty, empty, empty, empty)
        self.reads = 0
        self.source = Source(identity, "", self.load)

    def load(self):
        self.reads += 1
        return self.data


def test_the_data_are_read_once_and_given_to_every_unit(toy, options, store, watcher):
    experiment, shelf = toy.experiment(dataset="mnist"), Shelf()
    options = replace(options, data="MNIST")
    run = run_study(experiment, options, store, watcher, shelf.source)
    assert len(toy.data) == 3
    assert all(data is shelf.data for data in toy.data)
    assert shelf.reads == 1
    assert run.notice == ""
    assert {r.request.options.data for r in run.records.values()} == {"MNIST"}


def test_the_data_are_not_read_for_what_is_recorded(toy, options, store, watcher):
    experiment, options = toy.experiment(dataset="mnist"), replace(options, data="MNIST")
    run_study(experiment, options, store, watcher, Shelf().source)
    shelf = Shelf()
    run_study(experiment, options, store, watcher, shelf.source)
    collect(experiment, options, store)
    assert shelf.reads == 0


def test_a_record_made_with_other_data_is_redone(toy, options, store, watcher):
    experiment = toy.experiment(dataset="mnist")
    for identity in ("digits of scikit-learn", "MNIST"):
        with_data = replace(options, data=identity)
        run = run_study(experiment, with_data, store, watcher, Shelf(identity).source)
    assert toy.ran == 2 * [1, 2, 3]
    assert not run.missing
    assert "made with other settings" in watcher.outcomes["power-1"]


def test_what_stands_in_is_told(toy, options, store):
    experiment = toy.experiment(dataset="mnist")
    run = collect(experiment, replace(options, data="digits of scikit-learn"), store)
    assert "stand in" in run.notice


def test_an_experiment_needs_its_data(toy, options, store, watcher):
    experiment = toy.experiment(dataset="mnist")
    with pytest.raises(ValueError, match="toy needs a source of its data"):
        run_study(experiment, options, store, watcher)
    with pytest.raises(ValueError, match="must be 'MNIST', got ''"):
        run_study(experiment, options, store, watcher, Shelf().source)


def test_steps_of_what_is_recorded_are_not_to_be_done(toy, options, store, watcher):
    experiment = toy.experiment()
    assert steps_to_do(experiment, options, store) == 9
    toy.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        run_study(experiment, options, store, watcher)
    assert steps_to_do(experiment, options, store) == 6


@pytest.mark.parametrize("name", ["../up", "a/b", "", "A", ".hidden"])
def test_a_units_name_must_be_a_file_name(name):
    with pytest.raises(ValueError, match="file name"):
        Unit(name, None, 1)
