"""LandingSGD and LandingAdam in the Trainer of transformers: the same weights as by hand."""

import pytest
import torch

import ortholand as ol

pytest.importorskip("transformers", reason="needs transformers: pip install 'ortholand[ecosystem]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install 'ortholand[ecosystem]'")

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

pytestmark = [pytest.mark.ecosystem, pytest.mark.usefixtures("_forget_the_accelerator")]

NO_CLIPPING = 0.0


@pytest.fixture
def make_arguments(tmp_path):
    """Arguments that keep the order of the data, print nothing and save after every epoch."""

    def make(**options):
        defaults = dict(
            output_dir=str(tmp_path),
            use_cpu=True,
            num_train_epochs=4,
            per_device_train_batch_size=8,
            max_grad_norm=NO_CLIPPING,
            train_sampling_strategy="sequential",
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
            dataloader_pin_memory=False,
        )
        return TrainingArguments(**{**defaults, **options})

    return make


def examples(task):
    inputs, labels = task.dataset().tensors
    return [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]


def train(task, arguments, resume=None):
    """Train with our optimizer and torch's scheduler."""
    model = task.model()
    optimizer = task.make_optimizer(model)
    scheduler = task.make_scheduler(optimizer, arguments.gradient_accumulation_steps)
    trainer = Trainer(
        model, arguments, train_dataset=examples(task), optimizers=(optimizer, scheduler)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, (model, optimizer)


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        ({}, {}),
        ({"max_grad_norm": 0.2}, {"clip": 0.2}),
        ({"gradient_accumulation_steps": 3}, {"accumulate": 3}),
        ({"bf16": True}, {"bfloat16": True}),
    ],
    ids=["plain", "clipped", "accumulated", "bfloat16"],
)
def test_the_same_as_by_hand(task, make_arguments, assert_same_state, options, by_hand):
    _, run = train(task, make_arguments(**options))
    assert_same_state(run, task.train_by_hand(**by_hand)[:2])
    task.check_trained(*run)


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(
    task, tmp_path, make_arguments, assert_same_state
):
    _, whole = train(task, make_arguments())
    _, rest = train(task, make_arguments(), resume=str(tmp_path / "checkpoint-24"))
    assert_same_state(rest, whole)
    task.check_trained(*rest)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_schedules_of_the_trainer(task, make_arguments, kind):
    """The Trainer makes optimizer and schedule itself; both groups follow it from 0 on."""
    model = task.model()
    make, options = type(task.make_optimizer(model)), {"lr": 0.05, "attraction": "after"}
    trainer = Trainer(
        model,
        make_arguments(warmup_steps=5, lr_scheduler_type=kind),
        train_dataset=examples(task),
        optimizer_cls_and_kwargs=(make, {"params": task.make_groups(model), **options}),
    )
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history[:-1]]
    assert rates[:6] == pytest.approx([0, 0.01, 0.02, 0.03, 0.04, 0.05])
    assert rates[-1] == 0.05 if kind == "constant_with_warmup" else rates[-1] < 0.002
    first, second = trainer.optimizer.param_groups
    assert first["lr"] == second["lr"]
    assert ol.orthogonality_error(trainer.optimizer) < 1e-4
    assert task.loss(model) < task.loss(task.model())


def test_a_language_model_with_orthogonal_attention(tmp_path, make_arguments):
    """A model of transformers, grouped queries included; it learns to count, is saved and read."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=12, num_key_value_heads=2, use_cache=False, **sizes)
    model = LlamaForCausalLM(config)
    groups = ol.orthogonalize_(ol.param_groups(model, orthogonal="*.self_attn.*"))
    optimizer = ol.LandingAdam(groups, lr=0.01, attraction="after")
    scheduler = get_cosine_schedule_with_warmup(optimizer, 5, 48)
    counting = (torch.arange(96)[:, None] + torch.arange(8)) % 12
    dataset = [{"input_ids": row, "labels": row} for row in counting]
    arguments = make_arguments(max_grad_norm=1.0)
    trainer = Trainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, scheduler))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history[:-1]]
    assert losses[-1] < 0.2 * losses[0]
    trainer.save_model(str(tmp_path / "model"))
    read = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    errors = ol.orthogonality_error(read, orthogonal="*.self_attn.*", reduce=None)
    assert len(errors) == 8  # q, k, v and o in each of two layers
    assert max(errors.values()) < 1e-4
