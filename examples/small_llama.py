"""A small Llama that has read Python's documentation, for the examples that adapt or quantise one.

The text needs no download: it is what ``help("for")`` and the like show, about half a million
characters in the module ``pydoc_data.topics``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from transformers import LlamaConfig, LlamaForCausalLM

from showing import Tell


@dataclass(frozen=True)
class ModelSettings:
    """How large the model is, and how long it learns."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 64  # characters
    batch: int = 32
    steps: int = 1000
    validation: int = 12  # batches


USUAL_MODEL = ModelSettings()
QUICK_MODEL = ModelSettings(width=32, layers=1, context=32, batch=8, steps=60, validation=2)


@dataclass(frozen=True)
class Text:
    """Characters as numbers; the last tenth is for validation."""

    train: Tensor
    validation: Tensor


ALPHABET = [chr(i) for i in range(32, 127)] + ["\n", "\N{REPLACEMENT CHARACTER}"]


def encode(text: str) -> Text:
    """What is not ASCII becomes one character."""
    numbers = {character: i for i, character in enumerate(ALPHABET)}
    encoded = torch.tensor([numbers.get(character, len(ALPHABET) - 1) for character in text])
    border = len(text) * 9 // 10
    return Text(encoded[:border], encoded[border:])


def documentation() -> Text:
    """Python's own."""
    return encode("\n".join(topics.topics[name] for name in sorted(topics.topics)))


def batches(text: Tensor, settings: ModelSettings, n: int, seed: int) -> Iterable[Tensor]:
    """Random pieces of a text."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        shape = (settings.batch, 1)
        starts = torch.randint(len(text) - settings.context, shape, generator=generator)
        yield text[starts + torch.arange(settings.context)]


def train_llama(text: Text, settings: ModelSettings, seed: int, tell: Tell) -> LlamaForCausalLM:
    """A Llama that has read the text."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(ALPHABET),
            hidden_size=settings.width,
            intermediate_size=2 * settings.width,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            max_position_embeddings=settings.context,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    optimizer = AdamW(model.parameters(), lr=4e-3, weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, 4e-3, total_steps=settings.steps)
    for tokens in batches(text.train, settings, settings.steps, seed):
        tell(f"loss {descend(model, tokens, optimizer):.3f}")
        scheduler.step()
    return model


def descend(model: nn.Module, tokens: Tensor, optimizer: Optimizer) -> float:
    """One step."""
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def validate(model: nn.Module, text: Text, settings: ModelSettings) -> float:
    """Mean loss per character, in nats."""
    losses = [
        float(model(input_ids=tokens, labels=tokens).loss)
        for tokens in batches(text.validation, settings, settings.validation, seed=0)
    ]
    return statistics.mean(losses)
