"""Adapters of PEFT with orthogonal weights: converted, trained, saved, loaded, merged, refused."""

import copy
import functools
import json
import pickle

import pytest
import torch
from torch import nn

import ortholand as ol

pytest.importorskip("peft", reason="needs peft: pip install 'ortholand[ecosystem]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'ortholand[ecosystem]'")

from peft import (
    AdaLoraConfig,
    BOFTConfig,
    IA3Config,
    LoraConfig,
    OFTConfig,
    PeftModel,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ortholand.integrations.peft import create_landing_optimizer
from ortholand.integrations.peft.blocks import cayley, inverse_cayley
from ortholand.integrations.peft.factors import folded, singular_factors, unfolded

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.usefixtures("_forget_the_accelerator"),
    # BOFT looks for a CUDA compiler, and says so at every layer.
    pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension"),
    pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1"),
]

TARGETS = ["q_proj", "v_proj", "down_proj"]
SETTINGS = LlamaConfig(
    vocab_size=32,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)
ADAPTERS = {
    "lora": lambda: LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS),
    "oft": lambda: OFTConfig(r=0, oft_block_size=8, target_modules=TARGETS),
    "oft, shared": lambda: OFTConfig(
        r=0, oft_block_size=8, block_share=True, target_modules=TARGETS
    ),
    "boft": lambda: BOFTConfig(boft_block_size=8, target_modules=TARGETS),
    "boft, two factors": lambda: BOFTConfig(
        boft_block_size=4, boft_n_butterfly_factor=2, target_modules=["q_proj", "v_proj"]
    ),
    "dora": lambda: LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=TARGETS),
}
CASES = [
    ("lora", "both"),
    ("lora", "A"),
    ("lora", "B"),
    ("oft", "both"),
    ("oft, shared", "both"),
    ("boft", "both"),
    ("boft, two factors", "both"),
    ("dora", "both"),
    ("dora", "A"),
]


def make_base():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(SETTINGS)


def make_model(kind="lora", **options):
    config = ADAPTERS[kind]()
    for name, value in options.items():
        setattr(config, name, value)
    return get_peft_model(make_base(), config)


@pytest.fixture
def tokens():
    return torch.randint(32, (6, 12), generator=torch.Generator().manual_seed(1))


def logits(model, tokens):
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens).logits


def train(model, optimizer, tokens, steps=20):
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize(("kind", "factors"), CASES)
def test_trained_saved_loaded_and_merged(kind, factors, tokens, tmp_path):
    model = make_model(kind)
    before = logits(model, tokens)
    optimizer = create_landing_optimizer(model, lr=0.03, orthogonal_lr=0.01, factors=factors)
    torch.testing.assert_close(logits(model, tokens), before, rtol=0, atol=1e-6)
    first = model(input_ids=tokens, labels=tokens).loss.item()
    assert train(model, optimizer, tokens, steps=50) < first - 0.02
    assert ol.orthogonality_error(optimizer) < 1e-6
    assert optimizer.skipped_steps() == 0
    trained = logits(model, tokens)
    assert (trained - before).abs().max() > 0.01

    model.save_pretrained(tmp_path)
    alone = PeftModel.from_pretrained(make_base(), tmp_path)  # as one without this library does
    torch.testing.assert_close(logits(alone, tokens), trained, rtol=0, atol=1e-5)
    for safe in (False, True):
        merged = copy.deepcopy(model).merge_and_unload(safe_merge=safe)
        torch.testing.assert_close(logits(merged, tokens), trained, rtol=0, atol=1e-5)
    model.merge_adapter()
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model, tokens), trained, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "factors"), CASES)
def test_copies_and_state_dicts(kind, factors, tokens):
    model = make_model(kind)
    train(model, create_landing_optimizer(model, lr=0.02, factors=factors), tokens, steps=5)
    trained = logits(model, tokens)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.testing.assert_close(logits(other, tokens), trained, rtol=0, atol=0)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.9)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(other, tokens), trained, rtol=0, atol=1e-5)
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(("kind", "factors"), CASES)
def test_a_loaded_adapter_is_trained_further(kind, factors, tokens, tmp_path):
    model = make_model(kind)
    train(model, create_landing_optimizer(model, lr=0.01, factors=factors), tokens, steps=5)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_base(), tmp_path, is_trainable=True)
    optimizer = create_landing_optimizer(loaded, lr=0.01, factors=factors)
    torch.testing.assert_close(logits(loaded, tokens), logits(model, tokens), rtol=0, atol=1e-5)
    train(loaded, optimizer, tokens, steps=5)
    assert ol.orthogonality_error(optimizer) < 1e-6


def test_saved_files_are_those_of_an_ordinary_lora(tokens, tmp_path):
    """With one more tensor in them, vLLM and llama.cpp would refuse to load them."""
    ordinary, model = make_model(), make_model()
    train(model, create_landing_optimizer(model, lr=0.02), tokens, steps=3)
    for name, saved in (("ordinary", ordinary), ("landed", model)):
        saved.save_pretrained(tmp_path / name)
    shapes = [
        {key: value.shape for key, value in load_file(file).items()}
        for file in sorted(tmp_path.glob("*/adapter_model.safetensors"))
    ]
    assert shapes[0] == shapes[1]
    assert all(key.endswith(("lora_A.weight", "lora_B.weight")) for key in shapes[0])
    configs = [json.loads(f.read_text()) for f in sorted(tmp_path.glob("*/adapter_config.json"))]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("kind", ["linear", "cat", "svd"])
def test_sums_of_adapters(kind, tokens):
    model = make_model()
    train(model, create_landing_optimizer(model, lr=0.02), tokens, steps=5)
    first = logits(model, tokens)
    model.add_adapter("second", ADAPTERS["lora"]())
    model.set_adapter("second")
    train(model, create_landing_optimizer(model, lr=0.02, factors="A"), tokens, steps=5)
    model.add_weighted_adapter(["default", "second"], [1.0, 0.0], "sum", combination_type=kind)
    model.set_adapter("sum")
    torch.testing.assert_close(logits(model, tokens), first, rtol=0, atol=1e-5)


def test_batches_with_different_adapters(tokens):
    model = make_model()
    train(model, create_landing_optimizer(model, lr=0.02), tokens, steps=5)
    first = logits(model, tokens)
    with model.disable_adapter():
        none = logits(model, tokens)
    names = ["default"] * 3 + ["__base__"] * 3
    with torch.no_grad():
        mixed = model(input_ids=tokens, adapter_names=names).logits
    torch.testing.assert_close(mixed, torch.cat([first[:3], none[3:]]), rtol=0, atol=1e-6)


def test_two_adapters_of_a_layer(tokens):
    model = make_model()
    train(model, create_landing_optimizer(model, lr=0.02), tokens, steps=3)
    first = logits(model, tokens)
    model.add_adapter("second", ADAPTERS["lora"]())
    model.set_adapter("second")
    optimizer = create_landing_optimizer(model, lr=0.02)
    train(model, optimizer, tokens, steps=3)
    assert all(".second." in name for g in optimizer.param_groups for name in g["param_names"])
    second, state = logits(model, tokens), copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    for name, expected in (("second", second), ("default", first)):
        model.set_adapter(name)
        torch.testing.assert_close(logits(model, tokens), expected, rtol=0, atol=1e-5)
    model.delete_adapter("second")
    torch.testing.assert_close(logits(model, tokens), first, rtol=0, atol=1e-5)


def test_an_ordinary_lora_is_loaded_into_orthonormal_factors(tokens, tmp_path):
    ordinary = make_model()
    train(ordinary, torch.optim.AdamW(ordinary.parameters(), lr=0.02), tokens, steps=5)
    model = make_model()
    optimizer = create_landing_optimizer(model, lr=0.02)
    model.load_state_dict(ordinary.state_dict(), strict=False)
    torch.testing.assert_close(logits(model, tokens), logits(ordinary, tokens), rtol=0, atol=1e-5)
    assert ol.orthogonality_error(optimizer) < 1e-5


def test_groups(tokens):
    model = make_model(modules_to_save=["lm_head"])
    optimizer = create_landing_optimizer(model, lr=0.1, orthogonal_lr=0.2, weight_decay=0.3)
    orthogonal, diagonal, rest = optimizer.param_groups
    assert (orthogonal["orthogonal"], orthogonal["lr"]) == (True, 0.2)
    assert len(orthogonal["params"]) == 12
    assert all("lora_A" in name or "lora_B" in name for name in orthogonal["param_names"])
    assert (diagonal["orthogonal"], diagonal["lr"], diagonal["weight_decay"]) == (False, 0.1, 0.0)
    assert all(name.endswith("lora_A.default.diagonal") for name in diagonal["param_names"])
    assert rest["param_names"] == ["base_model.model.lm_head.modules_to_save.default.weight"]
    assert (rest["orthogonal"], rest["weight_decay"]) == (False, 0.3)


def test_a_second_optimizer_finds_what_the_first_made(tokens):
    model = make_model()
    train(model, create_landing_optimizer(model, lr=0.02), tokens, steps=3)
    trained = logits(model, tokens)
    again = create_landing_optimizer(model, ol.LandingMuon, lr=0.01, orthogonal_lr=0.02)
    torch.testing.assert_close(logits(model, tokens), trained, rtol=0, atol=0)
    train(model, again, tokens, steps=3)
    assert ol.orthogonality_error(again) < 1e-6


@pytest.mark.parametrize(("kind", "factors"), CASES)
@pytest.mark.parametrize("optimizer", [ol.LandingAdam, ol.LandingSGD, ol.LandingMuon])
def test_half_precision(kind, factors, optimizer, tokens):
    config = ADAPTERS[kind]()
    model = get_peft_model(make_base().bfloat16(), config, autocast_adapter_dtype=False)
    options = {"attraction": "after"} if optimizer is ol.LandingSGD else {}
    made = create_landing_optimizer(model, optimizer, lr=0.02, factors=factors, **options)
    train(model, made, tokens, steps=5)
    assert all(p.dtype is torch.bfloat16 for g in made.param_groups for p in g["params"])
    assert made.skipped_steps() == 0
    assert ol.orthogonality_error(made) < 0.05  # what bfloat16 can tell


@pytest.mark.parametrize("factors", ["both", "A", "B"])
def test_convolutions(factors, tmp_path):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3))
    images = torch.randn(4, 3, 9, 9)
    config = LoraConfig(r=3, target_modules=["0", "2"])
    model = get_peft_model(copy.deepcopy(base), config)
    optimizer = create_landing_optimizer(model, lr=0.05, factors=factors)
    torch.testing.assert_close(model(images), base(images), rtol=0, atol=1e-6)
    for _ in range(10):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    assert ol.orthogonality_error(optimizer) < 1e-6
    trained = model(images)
    model.save_pretrained(tmp_path)
    alone = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(alone(images), trained, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.merge_and_unload()(images), trained, rtol=0, atol=1e-5)


def test_large_factors_stay_orthonormal():
    """Rank 16 of 4,096: what the recipe's figures are of."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4096, 4096, bias=False))
    model = get_peft_model(base, LoraConfig(r=16, target_modules=["0"]))
    optimizer = create_landing_optimizer(model, lr=1e-3, orthogonal_lr=0.01)
    x = torch.randn(2, 4096)
    for _ in range(30):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    assert ol.orthogonality_error(optimizer) < 1e-6


# --- in the Trainer and under Accelerate


def make_arguments(folder, **options):
    defaults = dict(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=50,
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
        save_strategy="steps",
        save_steps=25,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return TrainingArguments(**{**defaults, **options})


def run_trainer(kind, folder, resume=None):
    torch.manual_seed(0)
    model = make_model(kind)
    optimizer = create_landing_optimizer(model, lr=0.01, orthogonal_lr=0.02)
    data = torch.randint(32, (40, 12), generator=torch.Generator().manual_seed(2))
    trainer = Trainer(
        model,
        make_arguments(folder),
        train_dataset=[{"input_ids": row, "labels": row} for row in data],
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, optimizer


@pytest.mark.parametrize("kind", ["lora", "oft", "boft"])
def test_in_the_trainer(kind, tokens, tmp_path):
    model, optimizer = run_trainer(kind, tmp_path / "run")
    assert ol.orthogonality_error(optimizer) < 1e-6
    trained = logits(model, tokens)
    assert (trained - logits(make_model(kind), tokens)).abs().max() > 0.01
    alone = PeftModel.from_pretrained(make_base(), tmp_path / "run" / "checkpoint-50")
    torch.testing.assert_close(logits(alone, tokens), trained, rtol=0, atol=1e-5)
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(logits(merged, tokens), trained, rtol=0, atol=1e-5)
    resumed, _ = run_trainer(kind, tmp_path / "again", str(tmp_path / "run" / "checkpoint-25"))
    torch.testing.assert_close(logits(resumed, tokens), trained, rtol=0, atol=1e-4)


def test_under_accelerate(tokens):
    accelerate = pytest.importorskip("accelerate")
    model = make_model()
    optimizer = create_landing_optimizer(model, lr=0.02)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
    assert ol.orthogonality_error(optimizer.optimizer) < 1e-6


# --- mathematics


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_singular_factors(rank):
    generator = torch.Generator().manual_seed(rank)
    B = torch.randn(9, rank, generator=generator, dtype=torch.float64)
    A = torch.randn(rank, 7, generator=generator, dtype=torch.float64)
    A[-1] = A[0]  # a product of lower rank is no obstacle
    U, s, Vh = singular_factors(B, A, seed=0)
    torch.testing.assert_close(U * s @ Vh, B @ A)
    assert ol.distance(U) < 1e-12
    assert ol.distance(Vh) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_folded_and_unfolded(dtype):
    """Signs of s are found again, though only B and diag(s) A are saved."""
    B = ol.random_orthogonal(9, 4, seed=0, dtype=torch.float64).to(dtype)
    A = ol.random_orthogonal(4, 7, seed=1, dtype=torch.float64).to(dtype)
    s = torch.tensor([0.5, -2.0, -1e-3, 30.0], dtype=dtype)
    saved = folded(A, s, B)
    torch.testing.assert_close(saved[1] @ saved[0], B * s @ A)
    tolerance = 10 * torch.finfo(dtype).eps
    for found, expected in zip(unfolded(*saved, torch.zeros_like(A)), (A, s, B), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_where_the_diagonal_is_zero():
    B, A = ol.random_orthogonal(9, 4, seed=0), ol.random_orthogonal(4, 7, seed=1)
    zero = folded(A, torch.zeros(4), B)
    found = unfolded(*zero, present=A)
    assert all(torch.equal(x, y) for x, y in zip(found, (A, torch.zeros(4), B), strict=True))
    s = torch.tensor([1.0, 0.0, -2.0, 0.0])
    rows, diagonal, columns = unfolded(*folded(A, s, B), present=A)
    torch.testing.assert_close(columns * diagonal @ rows, B * s @ A)
    assert ol.distance(rows) < 1e-6
    assert ol.distance(columns) < 1e-6


def test_one_factor_of_a_state_dict(tokens):
    """The other is that of the layer, as in any module."""
    model = make_model()
    train(model, create_landing_optimizer(model, lr=0.02), tokens, steps=5)
    trained = logits(model, tokens)
    for factor in ("lora_A", "lora_B"):
        part = {name: value for name, value in model.state_dict().items() if factor in name}
        model.load_state_dict(part, strict=False)
        torch.testing.assert_close(logits(model, tokens), trained, rtol=0, atol=1e-5)


def test_state_dicts_of_another_rank(tokens):
    model = make_model()
    create_landing_optimizer(model)
    with pytest.raises(RuntimeError, match=r"size mismatch.*lora_A"):
        model.load_state_dict(make_model(r=3).state_dict(), strict=False)


def test_cayley_and_back():
    R = ol.random_orthogonal(20, 6, 6, seed=0, special=True, dtype=torch.float64)
    torch.testing.assert_close(cayley(inverse_cayley(R, "R")), R)


def test_half_a_turn_cannot_be_saved(tokens, tmp_path):
    model = make_model("oft")
    optimizer = create_landing_optimizer(model, lr=0.02)
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0][0].copy_(
            torch.diag(torch.tensor([-1.0, -1] + [1] * 6))
        )
    with pytest.raises(ValueError, match=r"half a turn, but a block of .*q_proj.*merge_and_unload"):
        model.save_pretrained(tmp_path)


# --- bad input


def unchanged(model, tokens, error, match, **options):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=match):
        create_landing_optimizer(model, **options)
    after = model.state_dict()
    assert state.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in state.items())


def test_models_without_such_adapters(tokens):
    unchanged(make_base(), tokens, ValueError, "but got a LlamaForCausalLM.*LoraConfig")
    other = get_peft_model(make_base(), IA3Config(target_modules=TARGETS, feedforward_modules=[]))
    unchanged(other, tokens, ValueError, r"types \['ia3'\]")


def test_frozen_adapters(tokens, tmp_path):
    make_model().save_pretrained(tmp_path)
    frozen = PeftModel.from_pretrained(make_base(), tmp_path)
    unchanged(frozen, tokens, ValueError, "is_trainable=True")


def test_wrong_arguments(tokens):
    unchanged(make_model(), tokens, ValueError, "factors must be one of", factors="AB")
    unchanged(make_model(), tokens, TypeError, "AdamW", optimizer_cls=torch.optim.AdamW)
    unchanged(make_model(), tokens, TypeError, "SGD", optimizer_cls="SGD")
    unchanged(make_model(), tokens, TypeError, "seed must be a whole number", seed="0")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"orthogonal_lr": float("nan")}, "lr must be finite"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
        ({"betas": (2, 2)}, "betas must be in"),
    ],
)
def test_options_that_the_optimizer_refuses(options, match, tokens):
    unchanged(make_model(), tokens, ValueError, match, **options)


def test_ranks_that_are_too_high(tokens):
    model = make_model(r=30)
    unchanged(model, tokens, ValueError, r"layers.0.self_attn.q_proj has rank 30 and 24 inputs")
    unchanged(model, tokens, ValueError, r"rank 30 and 24 outputs.*rank_pattern", factors="B")


def test_variants_that_use_factors_otherwise(tokens):
    model = make_model(init_lora_weights="mica")
    for factors in ("both", "A"):
        match = r"layers.0.self_attn.q_proj is a MiCALinearVariant"
        unchanged(model, tokens, ValueError, match, factors=factors)


def test_adalora_has_singular_values_of_its_own(tokens):
    config = AdaLoraConfig(init_r=6, target_r=4, total_step=100, target_modules=TARGETS)
    model = get_peft_model(make_base(), config)
    for factors in ("both", "A"):
        unchanged(model, tokens, ValueError, r"types \['adalora'\]", factors=factors)


def test_stacked_experts(tokens):
    """Parameters that are no layers' weights."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 6))

        def forward(self, x):
            return torch.einsum("bi,eoi->bo", x, self.weight)

    config = LoraConfig(r=2, target_modules=[], target_parameters=["0.weight"])
    model = get_peft_model(nn.Sequential(Experts()), config)
    unchanged(model, tokens, ValueError, r"model.0 holds those of stacked experts")


def test_one_factor_is_frozen(tokens):
    for factor in "AB":
        model = make_model()
        for name, p in model.named_parameters():
            p.requires_grad_(p.requires_grad and f"lora_{factor}" not in name)
        match = f"{factor} of .*layers.0.self_attn.q_proj is frozen"
        unchanged(model, tokens, ValueError, match)
        unchanged(model, tokens, ValueError, match, factors="A")


def test_adapters_without_values(tokens):
    model = get_peft_model(make_base(), ADAPTERS["lora"](), low_cpu_mem_usage=True)
    with pytest.raises(ValueError, match=r"q_proj is on the meta device"):
        create_landing_optimizer(model)


def test_layers_with_forward_passes_of_their_own(tokens):
    """As those for quantised weights have: they call the factors, and know of no diagonal."""
    from peft.tuners.lora.layer import Linear, LoraLayer

    class Linear4bit(nn.Module, LoraLayer):
        def __init__(self, like):
            super().__init__()
            self.__dict__.update(like.__dict__)

        def forward(self, x):
            inner = self.lora_B["default"](self.lora_A["default"](x))
            return self.base_layer(x) + self.scaling["default"] * inner

        merge, get_delta_weight = Linear.merge, Linear.get_delta_weight

    model = make_model()
    attention = model.base_model.model.model.layers[1].self_attn
    attention.v_proj = Linear4bit(attention.v_proj)
    before = logits(model, tokens)
    optimizer = create_landing_optimizer(model, lr=0.02)
    torch.testing.assert_close(logits(model, tokens), before, rtol=0, atol=1e-6)
    train(model, optimizer, tokens, steps=5)
    assert ol.orthogonality_error(optimizer) < 1e-6
    trained = logits(model, tokens)
    torch.testing.assert_close(logits(model.merge_and_unload(), tokens), trained, rtol=0, atol=1e-5)


def quantized_base(bits):
    """Weights as bitsandbytes quantises them when a model is loaded."""
    bnb = pytest.importorskip("bitsandbytes", reason="needs pip install bitsandbytes")
    sizes = dict(hidden_size=64, intermediate_size=64, head_dim=16)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SETTINGS.to_dict(), **sizes}))
    if bits == 4:
        make_layer = functools.partial(bnb.nn.Linear4bit, compute_dtype=torch.float32)
        make_weight = functools.partial(bnb.nn.Params4bit, requires_grad=False)
    else:
        make_layer = functools.partial(bnb.nn.Linear8bitLt, has_fp16_weights=False)
        make_weight = functools.partial(
            bnb.nn.Int8Params, requires_grad=False, has_fp16_weights=False
        )
    for holder in list(model.model.modules()):
        for name, layer in list(holder.named_children()):
            if type(layer) is nn.Linear:
                quantized = make_layer(layer.in_features, layer.out_features, bias=False)
                quantized.weight = make_weight(layer.weight.data)
                setattr(holder, name, quantized)
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return model.to("cpu")  # here they are quantised


@pytest.mark.filterwarnings("ignore::UserWarning")  # of rounding, when adapters are merged
@pytest.mark.parametrize(
    ("bits", "kind"),  # with DoRA, 8 bits do not run on CPUs, whoever trains
    [(4, "lora"), (4, "dora"), (4, "oft"), (8, "lora"), (8, "oft")],
)
def test_quantised_base_weights(bits, kind, tokens, tmp_path):
    model = get_peft_model(quantized_base(bits), ADAPTERS[kind]())
    optimizer = create_landing_optimizer(model, lr=0.02)
    train(model, optimizer, tokens, steps=10)
    assert ol.orthogonality_error(optimizer) < 1e-5
    trained = logits(model, tokens)
    model.save_pretrained(tmp_path)
    alone = PeftModel.from_pretrained(quantized_base(bits), tmp_path)
    torch.testing.assert_close(logits(alone, tokens), trained, rtol=0, atol=1e-4)
    # Merged weights are quantised again.
    merged = logits(model.merge_and_unload(), tokens)
    assert (merged - trained).abs().max() < (0.2 if bits == 4 else 0.02)


def test_shared_factors(tokens):
    model = make_model()
    layers = model.base_model.model.model.layers
    shared = layers[0].self_attn.q_proj.lora_A
    layers[1].self_attn.q_proj.lora_A = shared
    unchanged(model, tokens, ValueError, r"layers.0.self_attn.q_proj and .*layers.1.*share one")


def test_tied_adapters_of_embedding_and_head(tokens):
    """PEFT ties them by parameters of their own on the same memory."""
    settings = LlamaConfig(**{**SETTINGS.to_dict(), "tie_word_embeddings": True})
    config = LoraConfig(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    model = get_peft_model(LlamaForCausalLM(settings), config)
    unchanged(model, tokens, ValueError, r"lm_head and .*embed_tokens.*share one")


def test_blocks_that_cannot_turn(tokens):
    model = make_model("oft", oft_block_size=1)
    unchanged(model, tokens, ValueError, r"q_proj are 1 x 1. Use a larger oft_block_size")
    unchanged(make_model("oft", coft=True), tokens, ValueError, "coft=False")


def test_merged_adapters(tokens):
    model = make_model()
    model.merge_adapter()
    unchanged(model, tokens, ValueError, "unmerge_adapter")


def test_another_boft_adapter(tokens):
    model = make_model("boft")
    create_landing_optimizer(model)
    with pytest.raises(ValueError, match="'second' is to be added"):
        model.add_adapter("second", ADAPTERS["boft"]())
    model = make_model("boft")
    model.add_adapter("second", ADAPTERS["boft"]())
    unchanged(model, tokens, ValueError, r"has \['default', 'second'\].*delete_adapter")


def test_other_factors_than_before(tokens):
    model = make_model()
    create_landing_optimizer(model)
    unchanged(model, tokens, ValueError, "made orthonormal before", factors="A")
