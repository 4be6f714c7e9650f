"""Optimizers, groups and schedules from Hydra's ``instantiate``, configured as users do it."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import ortholand as ol

pytest.importorskip("hydra", reason="needs hydra-core: pip install 'ortholand[ecosystem]'")

from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate

pytestmark = pytest.mark.ecosystem

CONFIG = """
model:
  _target_: torch.nn.Linear
  in_features: 8
  out_features: 6

groups:
  _target_: ortholand.param_groups
  _partial_: true
  orthogonal: [weight]
  other_options: {weight_decay: 0.01}

optimizer:
  _target_: ortholand.LandingSGD
  _partial_: true
  lr: 0.1
  attraction: after

scheduler:
  _target_: ortholand.PowerLawLR
  _partial_: true
  alpha: 0.5
"""


@pytest.fixture
def configure(tmp_path):
    """The configuration with overrides, as on a command line."""
    Path(tmp_path / "config.yaml").write_text(CONFIG)

    def read(*overrides):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return compose("config", overrides=list(overrides))

    return read


def make_all(config):
    """The model, its optimizer and the scheduler: the whole of a user's code."""
    torch.manual_seed(0)
    model = instantiate(config.model)
    groups = ol.orthogonalize_(instantiate(config.groups)(model))
    optimizer = instantiate(config.optimizer)(groups)
    return model, optimizer, instantiate(config.scheduler)(optimizer)


def train(model, optimizer, scheduler, steps=50):
    """Towards the outputs of another orthogonal map; the losses."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 8, generator=generator)
    goal = inputs @ ol.random_orthogonal(8, 6, seed=2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), goal)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


OVERRIDES = {
    "sgd": ["optimizer.lr=1.0", "+optimizer.momentum=0.5"],
    "adam": ["optimizer._target_=ortholand.LandingAdam"],
    "kernel": ["optimizer.lr=1.0", "+groups.view=kernel", "+optimizer.safe_step=null"],
}


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_trained_from_a_configuration(configure, overrides):
    model, optimizer, scheduler = make_all(configure(*overrides))
    losses = train(model, optimizer, scheduler)
    assert losses[-1] < 0.5 * losses[0]
    assert ol.orthogonality_error(optimizer) < 1e-4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.defaults["lr"] / 51**0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]


def test_the_same_as_by_hand(configure):
    model, optimizer, scheduler = make_all(configure())
    train(model, optimizer, scheduler)
    torch.manual_seed(0)
    other = nn.Linear(8, 6)
    groups = ol.param_groups(other, "weight", other_options={"weight_decay": 0.01})
    by_hand = ol.LandingSGD(ol.orthogonalize_(groups), lr=0.1, attraction="after")
    train(other, by_hand, ol.PowerLawLR(by_hand, alpha=0.5))
    assert torch.equal(model.weight, other.weight)


def test_all_of_it_from_one_nested_configuration():
    optimizer = instantiate(
        {
            "_target_": "ortholand.LandingAdam",
            "lr": 0.01,
            "params": {
                "_target_": "ortholand.orthogonalize_",
                "target": {
                    "_target_": "ortholand.param_groups",
                    "orthogonal": "weight",
                    "model": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 3},
                },
            },
        }
    )
    assert isinstance(optimizer, ol.LandingAdam)
    assert ol.orthogonality_error(optimizer, reduce=None).keys() == {"weight"}


def test_groups_are_handed_over_as_an_argument_without_name(configure):
    """Hydra makes configurations of dictionaries in named arguments, also for torch's SGD."""
    config = configure("optimizer._partial_=false").optimizer
    groups = ol.orthogonalize_(ol.param_groups(nn.Linear(8, 6), orthogonal="weight"))
    assert len(instantiate(config, groups).param_groups) == 2
    with pytest.raises(InstantiationException, match="DictConfig"):
        instantiate(config, params=groups)
    with pytest.raises(InstantiationException, match="DictConfig"):
        instantiate({"_target_": "torch.optim.SGD", "lr": 0.1}, params=groups)


@pytest.mark.parametrize("target", ["ortholand.LandingSGD", "ortholand.LandingAdam"])
def test_everything_can_be_pickled_and_copied(configure, target):
    config = configure(f"optimizer._target_={target}")
    model, optimizer, scheduler = make_all(config)
    train(model, optimizer, scheduler, steps=3)
    for duplicate in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(duplicate) is type(optimizer)
        assert duplicate.defaults.items() >= optimizer.defaults.items()
        for ours, theirs in zip(duplicate.param_groups, optimizer.param_groups, strict=True):
            assert all(torch.equal(*p) for p in zip(ours["params"], theirs["params"], strict=True))
    partial = pickle.loads(pickle.dumps(instantiate(config.optimizer)))
    assert partial(model.parameters(), orthogonal=False).defaults["lr"] == 0.1


def test_what_is_saved_holds_no_configuration(configure, tmp_path):
    """Groups made by a configuration, too, are read back with ``weights_only=True``."""
    _, optimizer, _ = make_all(configure("+groups.options={lr: 0.3}"))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert [group["lr"] for group in state["param_groups"]] == [0.3, 0.1]


@pytest.mark.parametrize("convert", ["all", "none"])
def test_betas_as_hydra_hands_them_over(configure, tmp_path, convert):
    """A list of Hydra's own, or with ``_convert_: all`` a list."""
    target, betas = "optimizer._target_=ortholand.LandingAdam", "+optimizer.betas=[0.8,0.9]"
    config = configure(target, betas, f"+optimizer._convert_={convert}")
    _, optimizer, _ = make_all(config)
    for options in (optimizer.defaults, *optimizer.param_groups):
        assert options["betas"] == (0.8, 0.9)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)
