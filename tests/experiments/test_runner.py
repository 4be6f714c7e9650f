from dataclasses import replace

import pytest
import torch

from ortholand.experiments.records import Records
from ortholand.experiments.runner import collect, request_of, run_experiment
from ortholand.experiments.spec import Unit, Verdict


def numbers(run):
    return {name: record.result for name, record in run.records.items()}


def test_what_is_recorded_is_not_run_again(toy, options, store, watcher):
    experiment = toy.experiment()
    first = run_experiment(experiment, options, store, watcher)
    assert toy.ran == [1, 2, 3]
    assert not first.missing
    second = run_experiment(experiment, options, store, watcher)
    assert toy.ran == [1, 2, 3]
    assert numbers(second) == numbers(first)
    assert set(watcher.outcomes.values()) == {"recorded already"}
    assert watcher.done == watcher.total == 2 * 9


def test_an_interrupted_run_resumes_and_ends_with_the_same_numbers(
    toy, options, store, watcher, tmp_path
):
    experiment = toy.experiment()
    toy.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, options, store, watcher)
    toy.interrupt_at = None
    resumed = run_experiment(experiment, options, store, watcher)
    assert toy.ran == [1, 2, 3]
    whole = run_experiment(experiment, options, replace(store, root=tmp_path / "other"), watcher)
    assert numbers(resumed) == numbers(whole)


def test_a_damaged_record_is_redone(toy, options, store, watcher):
    experiment = toy.experiment()
    whole = run_experiment(experiment, options, store, watcher)
    path = store.path(request_of(experiment, experiment.units("quick")[1], options))
    path.write_bytes(path.read_bytes()[:-20])
    assert collect(experiment, options, store).missing.keys() == {"power-2"}
    again = run_experiment(experiment, options, store, watcher)
    assert toy.ran == [1, 2, 3, 2]
    assert "damaged" in watcher.outcomes["power-2"]
    assert numbers(again) == numbers(whole)


def test_other_settings_and_revisions_are_redone(toy, options, store, watcher):
    run_experiment(toy.experiment(), options, store, watcher)
    longer = toy.experiment(settings={"quick": type(toy.experiment().settings["quick"])(4)})
    run = run_experiment(longer, options, store, watcher)
    assert len(run.records["power-1"].series("y")) == 4
    run_experiment(replace(longer, revision=2), options, store, watcher)
    assert toy.ran == 3 * [1, 2, 3]


def test_a_unit_runs_with_the_threads_asked_for(toy, options, store, watcher):
    before = torch.get_num_threads()
    run = run_experiment(toy.experiment(), replace(options, threads=before + 1), store, watcher)
    assert run.records["power-1"].machine["threads"] == before + 1
    assert torch.get_num_threads() == before


def test_a_claim_without_its_record_is_not_decided(toy, options, store, watcher):
    toy.interrupt_at = 3
    with pytest.raises(KeyboardInterrupt):
        run_experiment(toy.experiment(), options, store, watcher)
    [(_, finding)] = collect(toy.experiment(), options, store).findings()
    assert finding.verdict is Verdict.OPEN
    assert "power-3" in finding.measured


def test_a_mistake_in_a_claim_is_not_hidden(toy):
    claim = replace(toy.experiment().claims[0], check=lambda _: {}["oops"])
    with pytest.raises(KeyError):
        claim.judge(Records({}))


@pytest.mark.parametrize("name", ["../up", "a/b", "", "A", ".hidden"])
def test_a_units_name_must_be_a_file_name(name):
    with pytest.raises(ValueError, match="file name"):
        Unit(name, None, 1)
