"""Hubs that hand a class of optimizers plain parameters, or decay and no-decay groups.

The model marks its weights. Every hub trains the same weights as a loop by hand, bit for bit.
"""

import importlib
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import ortholand as ol

pytestmark = pytest.mark.ecosystem

DECAY = 0.01
IGNORED = "ignore:weight_decay=.* is ignored for 2 marked weights:UserWarning"


class Net(nn.Module):
    """The names of its parts are none that a hub knows; the loss is in the outputs."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.stem = nn.Linear(12, 20)
            self.mix = ol.orthogonal(nn.Linear(20, 20))
            self.norm = nn.LayerNorm(20)
            self.out = ol.orthogonal(nn.Linear(20, 8), scale=2.0)
            self.head = nn.Linear(8, 3)

    def forward(self, inputs, labels=None):
        hidden = self.norm(torch.tanh(self.mix(torch.tanh(self.stem(inputs)))))
        logits = self.head(torch.tanh(self.out(hidden)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def data():
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(96, 12, generator=generator)
    return inputs, (inputs @ torch.randn(12, 3, generator=generator)).argmax(1)


def batches():
    return zip(*(part.split(8) for part in data()), strict=True)


def train(model, optimizer):
    for inputs, labels in batches():
        optimizer.zero_grad()
        model(inputs, labels)["loss"].backward()
        optimizer.step()
    return model


def by_hand(decayed=lambda name, p: p.ndim > 1, decay=DECAY, cls=ol.LandingAdam, **options):
    """The weights after a loop with groups from ``param_groups``, the rest split by decay."""
    model = Net()
    *marked, rest = ol.param_groups(model)
    parts = [
        {**rest, "params": [m for m in rest["params"] if decayed(*m) == yes], "weight_decay": value}
        for yes, value in ((True, decay), (False, 0.0))
    ]
    groups = [*marked, *(part for part in parts if part["params"])]
    return train(model, cls(groups, **{"lr": 0.01, **options}))


def check(model, expected):
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert ol.orthogonality_error(model) < 1e-4
    with torch.no_grad():
        inputs, labels = data()
        assert model(inputs, labels)["loss"] < 0.95 * Net()(inputs, labels)["loss"]


@pytest.mark.usefixtures("_forget_the_accelerator")
@pytest.mark.filterwarnings(IGNORED)
def test_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    inputs, labels = data()
    model = Net()
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            num_train_epochs=1,
            weight_decay=DECAY,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)],
        optimizer_cls_and_kwargs=(ol.LandingAdam, {"lr": 0.01}),
    )
    trainer.train()
    decays = trainer.get_decay_parameter_names(Net())
    assert "norm.weight" not in decays
    assert "mix.weight" in decays
    check(model, by_hand(lambda name, _: name in decays))


CLI = """
seed_everything: 0
optimizer:
  class_path: ortholand.LandingAdam
  init_args: {lr: 0.02, betas: [0.8, 0.95], weight_decay: 0.01, attraction: after, eps: 0.4}
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
"""


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lightning_cli(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    pytest.importorskip("jsonargparse")
    from lightning.pytorch import LightningModule
    from lightning.pytorch.cli import LightningCLI
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return self.net(*batch)["loss"]

        def train_dataloader(self):
            return DataLoader(TensorDataset(*data()), batch_size=8)

    (tmp_path / "config.yaml").write_text(CLI)
    command = ["train.py", "fit", "--config", str(tmp_path / "config.yaml")]
    monkeypatch.setattr(sys, "argv", command)
    cli = LightningCLI(Module, save_config_callback=None)
    options = {"lr": 0.02, "betas": (0.8, 0.95), "attraction": "after", "eps": 0.4}
    check(cli.model.net, by_hand(lambda *_: True, **options))


@pytest.fixture(scope="module")
def timm():
    from tests.ecosystem.torchvision_stub import torchvision_or_a_stub

    if find_spec("timm") is None:
        pytest.skip("needs timm: pip install --no-deps timm")
    with torchvision_or_a_stub():
        return importlib.import_module("timm")


@pytest.mark.filterwarnings(IGNORED)
def test_timm(timm):
    from timm.optim import OptimInfo, OptimizerRegistry, create_optimizer_v2
    from timm.optim._optim_factory import default_registry

    info = OptimInfo("landing", "ortholand.LandingAdam", has_eps=False, has_betas=True)
    options = {"lr": 0.01, "weight_decay": DECAY, "betas": (0.9, 0.999)}
    expected = by_hand()
    default_registry.register(info)
    model = Net()
    # Its training script passes AdamW's eps, which the registry drops.
    optimizer = create_optimizer_v2(model, "landing", eps=1e-8, **options)
    check(train(model, optimizer), expected)
    own = OptimizerRegistry()
    own.register(info)
    model = Net()
    check(train(model, own.create_optimizer(model, "landing", **options)), expected)
    # Weights that it is told to leave to AdamW are in groups of their own.
    model = Net()
    optimizer = create_optimizer_v2(model, "landing", fallback_list=["head.*"], **options)
    assert any(group.get("use_fallback") for group in optimizer.param_groups)
    train(model, optimizer)
    check(model, expected)


@pytest.mark.filterwarnings("ignore:weight_decay=.* is ignored")
def test_timm_vision_transformer_and_its_average(timm):
    """A model from timm, marked from outside, with layer-wise learning rates and timm's EMA."""
    from timm.optim import OptimInfo, create_optimizer_v2
    from timm.optim._optim_factory import default_registry
    from timm.utils import ModelEmaV3

    default_registry.register(
        OptimInfo("landing", "ortholand.LandingAdam", has_eps=False, has_betas=True)
    )
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2, num_classes=5
    )
    for block in model.blocks:
        ol.orthogonal(block.attn.proj)
    optimizer = create_optimizer_v2(model, "landing", lr=0.01, weight_decay=0.05, layer_decay=0.7)
    average = ModelEmaV3(model, decay=0.9)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 5
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(model(images), labels))
        losses[-1].backward()
        optimizer.step()
        average.update(model)
        ol.orthogonalize_(average.module)
    assert losses[-1] < 0.7 * losses[0]
    assert len([g for g in optimizer.param_groups if g["orthogonal"]]) == 2  # one for each layer
    assert ol.orthogonality_error(model) < 1e-4
    assert ol.orthogonality_error(average.module) < 1e-5


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchtitan():
    pytest.importorskip("torchtitan", reason="needs torchtitan: Python 3.11 or newer")
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    class Container(OptimizersContainer):
        _resolve_optimizer_factory = staticmethod(lambda name: getattr(ol, name))

    def groups(pattern, decay):
        options = {"lr": 0.01, "weight_decay": decay}
        return ParamGroupConfig(
            pattern=pattern, optimizer_name="LandingAdam", optimizer_kwargs=options
        )

    config = Container.Config(
        param_groups=[groups(r"norm|bias", 0.0), groups(".*", DECAY)], implementation="for-loop"
    )
    model, other = Net(), Net()
    container = Container(config, model_parts=[model])
    check(train(model, container), by_hand(foreach=False, fused=False))
    names = [name for g in container.optimizers[0].param_groups for name in g["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    # A checkpoint, which torchtitan keys by names, goes on as if nothing had happened.
    resumed = Container(config, model_parts=[other])
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(container.state_dict())
    train(model, container)
    train(other, resumed)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("path", ["ortholand.LandingAdam", "ortholand.optim.LandingSGD"])
def test_kohya(path):
    """What ``--optimizer_type module.Class --optimizer_args key=value`` does, by its two lines."""
    module, name = path.rsplit(".", 1)
    cls = getattr(importlib.import_module(module), name)
    model = Net()
    trainable = [{"params": [p for p in model.parameters() if p.requires_grad], "lr": 0.02}]
    optimizer = cls(trainable, lr=0.01, attraction="after")
    expected = by_hand(decay=0.0, cls=cls, lr=0.02, attraction="after")
    check(train(model, optimizer), expected)


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pytorch_optimizer():
    """``load_optimizer`` knows its own names only; its dictionary of them takes others."""
    package = pytest.importorskip("pytorch_optimizer")
    from pytorch_optimizer.optimizer import OPTIMIZERS

    with pytest.raises(NotImplementedError, match="not implemented optimizer"):
        package.load_optimizer("ortholand.LandingAdam")
    OPTIMIZERS["landingadam"] = ol.LandingAdam
    assert package.load_optimizer("LandingAdam") is ol.LandingAdam
    model = Net()
    optimizer = package.create_optimizer(model, "LandingAdam", lr=0.01, weight_decay=DECAY)
    decayed = lambda name, p: not (name.startswith("norm") or name.endswith("bias"))  # noqa: E731
    check(train(model, optimizer), by_hand(decayed))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_average_of_lightning_is_projected_by_the_module():
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return self.net(*batch)["loss"]

        def configure_optimizers(self):
            return ol.LandingAdam(self.parameters(), lr=0.05)

        def on_train_end(self):
            self.error_before = ol.orthogonality_error(self)
            ol.orthogonalize_(self)

    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[EMAWeightAveraging(decay=0.9)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(*data()), batch_size=8))
    assert module.error_before > 1e-3
    assert ol.orthogonality_error(module) < 1e-5
