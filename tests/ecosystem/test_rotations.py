"""Rotations in models of transformers: nothing changes, they are learnt, they are folded."""

import copy

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand_lab.rotations import Quantization, fold_rotations_, insert_rotations

transformers = pytest.importorskip("transformers", reason="pip install 'ortholand[ecosystem]'")

pytestmark = pytest.mark.ecosystem

SIZES = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


def llama(**options):
    options = {**SIZES, **options}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))


MODELS = {
    "llama": llama,
    "llama, biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama, wide heads": lambda: llama(head_dim=16),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)
    ),
    "granite": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**SIZES, embedding_multiplier=3.0, residual_multiplier=0.5)
    ),
    "granite, sinks": lambda: transformers.GraniteSWAForCausalLM(
        transformers.GraniteSWAConfig(**SIZES, tie_word_embeddings=False)
    ),
    "hunyuan": lambda: transformers.HunYuanDenseV1ForCausalLM(
        transformers.HunYuanDenseV1Config(**SIZES, head_dim=8, tie_word_embeddings=False)
    ),
}


def make_model(name="llama", **options):
    """With weights of usual size, and norms and biases that are not trivial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]() if name in MODELS and not options else llama(**options)
        with torch.no_grad():
            for key, p in model.named_parameters():
                if "norm" in key:
                    p.uniform_(0.5, 2)
                else:
                    p.normal_(std=0.15)
    return model.eval()


@pytest.fixture
def tokens():
    return torch.randint(48, (4, 12), generator=torch.Generator().manual_seed(1))


def logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens).logits


def assert_same(model, tokens, expected, tolerance=1e-5):
    torch.testing.assert_close(logits(model, tokens), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("start", ["hadamard", "random", "identity"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes(name, start, tokens):
    model = make_model(name)
    before, keys = logits(model, tokens), model.state_dict().keys()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    insert_rotations(model, start=start)
    assert_same(model, tokens, before, tolerance=5e-5)  # weights are turned in float32
    assert fold_rotations_(model) is model
    assert_same(model, tokens, before)
    assert model.state_dict().keys() == keys
    moved = not torch.equal(
        model.state_dict()["model.embed_tokens.weight"], weights["model.embed_tokens.weight"]
    )
    assert moved == (start != "identity")


@pytest.mark.parametrize(("residual", "heads"), [(True, False), (False, True)])
def test_one_kind_of_rotation(residual, heads, tokens):
    model = make_model()
    before = logits(model, tokens)
    rotations = insert_rotations(model, residual=residual, heads=heads)
    assert [tuple(p.shape) for p in rotations.parameters()] == (
        [(32, 32)] if residual else [(8, 8)] * 2
    )
    assert_same(model, tokens, before)
    assert_same(fold_rotations_(model), tokens, before)


@pytest.mark.parametrize("optimizer", [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon])
def test_learnt_against_the_quantised_loss(optimizer, tokens):
    model = make_model()
    before = logits(model, tokens)
    rotations = insert_rotations(model, quantization=Quantization(4, 4))
    assert (logits(model, tokens) - before).abs().max() > 0.05  # it is quantised
    options = {"attraction": "after"} if optimizer is ol.LandingSGD else {}
    learner = optimizer(rotations.parameters(), lr=0.01, **options)
    target = before.softmax(-1)
    losses = []
    for _ in range(30):
        learner.zero_grad()
        found = model(input_ids=tokens).logits.log_softmax(-1)
        loss = nn.functional.kl_div(found, target, reduction="batchmean")
        loss.backward()
        learner.step()
        losses.append(loss.item())
    assert min(losses[-10:]) < losses[0]
    assert ol.orthogonality_error(learner) < 1e-5
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"rotations.{n}" for n, _ in rotations.named_parameters()
    }
    assert_same(fold_rotations_(model), tokens, before)


def test_straight_through_gradients_are_right_without_quantisation(tokens):
    """The loss does not depend on rotations then, so their tangent gradients are zero."""
    model = make_model().double()
    rotations = insert_rotations(model, start="random")
    model(input_ids=tokens, labels=tokens).loss.backward()
    for R in rotations.parameters():
        assert R.grad.norm() > 1e-4  # normal to the manifold: off it the loss does change
        # The norms of transformers compute in float32.
        assert (R.grad @ R.mT - R @ R.grad.mT).norm() < 1e-5 * R.grad.norm()


def test_copies_and_state_dicts(tokens):
    model = make_model()
    insert_rotations(model, quantization=Quantization(4, 4), seed=1)
    other = make_model()
    insert_rotations(other, quantization=Quantization(4, 4), seed=2)
    assert not torch.equal(logits(model, tokens), logits(other, tokens))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(model, tokens), logits(other, tokens))
    third = copy.deepcopy(model)
    with torch.no_grad():
        third.rotations.residual.copy_(torch.eye(32))
    assert not torch.equal(logits(model, tokens), logits(third, tokens))  # its own rotations
    fold_rotations_(third)


def test_half_precision(tokens):
    model = make_model().bfloat16()
    before = logits(model, tokens).float()
    rotations = insert_rotations(model)
    assert all(p.dtype is torch.float32 for p in rotations.parameters())
    fold_rotations_(model)
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())
    error = (logits(model, tokens).float() - before).abs().max()
    assert error < 0.1 * before.abs().max()


def test_tied_weights(tokens):
    model = make_model(tie_word_embeddings=True)
    before = logits(model, tokens)
    refused(model, r"model.embed_tokens and lm_head share one. Use untie=True")
    insert_rotations(model, untie=True)
    assert_same(model, tokens, before)
    assert model.config.tie_word_embeddings is False
    assert_same(fold_rotations_(model), tokens, before)


# --- bad input


def refused(model, match, **options):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        insert_rotations(model, **options)
    after = model.state_dict()
    assert state.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in state.items())


def test_models_of_other_types():
    refused(nn.Linear(4, 4), r"the model \(Linear\) has no model")
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=16)
    )
    refused(gpt, "GPT2LMHeadModel.* has no model")
    gemma = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, head_dim=8, tie_word_embeddings=False)
    )
    refused(gemma, "model.embed_tokens is a .*Gemma2TextScaledWordEmbedding")
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))
    refused(mixtral, "model.layers.0 .*has no mlp|model.layers.0.mlp .*has no gate_proj")


def test_layer_norms():
    model = make_model()
    model.model.layers[1].post_attention_layernorm = nn.LayerNorm(32)
    refused(model, r"model.layers.1.post_attention_layernorm \(LayerNorm\) computes")


def test_further_norms():
    model = make_model()
    model.model.layers[0].mlp.norm = nn.RMSNorm(32)
    refused(model, r"model.layers.0.mlp.norm is another one \(RMSNorm\)")


def test_weights_of_other_kinds():
    """Scales of the residual stream, coordinate by coordinate, do not turn with it."""
    doge = transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES, tie_word_embeddings=False))
    refused(doge, r"model.layers.0.input_residual is a weight of another kind")
    model = make_model()
    model.model.register_parameter("positions", nn.Parameter(torch.zeros(32, 32)))
    refused(model, r"model.positions is a weight of another kind")


def test_models_with_adapters():
    peft = pytest.importorskip("peft", reason="needs pip install 'ortholand[ecosystem]'")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["v_proj"]))
    with pytest.raises(ValueError, match=r"without wrappers and adapters"):
        insert_rotations(model)
    with pytest.raises(ValueError, match=r"self_attn.v_proj is a peft.*merge_and_unload"):
        insert_rotations(model.base_model.model)


class Linear4bit(nn.Linear):
    """As those of quantised models are."""


def test_quantised_layers():
    model = make_model()
    model.model.layers[1].mlp.up_proj = Linear4bit(32, 40, bias=False)
    refused(model, r"model.layers.1.mlp.up_proj is a .*Linear4bit.*before quantising it")


class QuantizedTensor(torch.Tensor):
    """As the weights of torchao are: in plain layers, and with a floating-point type."""


def test_quantised_weights_of_plain_layers():
    model = make_model()
    model.lm_head.weight = nn.Parameter(
        model.lm_head.weight.data.as_subclass(QuantizedTensor), requires_grad=False
    )
    refused(model, r"lm_head holds QuantizedTensor.*before it is quantised")
    model = make_model()
    model.model.layers[0].mlp.gate_proj.weight = nn.Parameter(
        torch.zeros(40, 32, dtype=torch.int8), requires_grad=False
    )
    refused(model, r"model.layers.0.mlp.gate_proj holds torch.int8")


def test_sizes_without_hadamard(tokens):
    model = make_model(hidden_size=52, head_dim=8)
    refused(model, "The residual stream: .* got size 52. Use start='random'")
    before = logits(model, tokens)
    insert_rotations(model, start="random")
    assert_same(fold_rotations_(model), tokens, before, tolerance=2e-5)


def test_sizes_that_are_no_powers_of_two(tokens):
    model = make_model(hidden_size=48, head_dim=12)
    before = logits(model, tokens)
    rotations = insert_rotations(model)
    torch.testing.assert_close(rotations.residual.abs(), torch.full((48, 48), 48**-0.5))
    assert_same(fold_rotations_(model), tokens, before)


def test_heads_that_cannot_turn(tokens):
    model = make_model()
    for layer in model.model.layers:
        del layer.self_attn.head_dim
    refused(model, r"model.layers.0.self_attn has no head_dim.*heads=False")
    for layer in model.model.layers:
        layer.self_attn.head_dim = 5
    refused(model, r"v_proj has 16 outputs and head_dim is 5. Use heads=False")
    insert_rotations(model, heads=False)
    one = make_model(head_dim=1, num_attention_heads=2)
    refused(one, r"A head of model.layers.0 has 1")


def test_wrong_arguments():
    refused(make_model(), "start must be one of", start="eye")
    refused(make_model(), "something to rotate", residual=False, heads=False)
    model = make_model()
    insert_rotations(model)
    with pytest.raises(ValueError, match="inserted once"):
        insert_rotations(model)
    with pytest.raises(ValueError, match="must have rotations"):
        fold_rotations_(make_model())


def test_weights_without_values():
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ValueError, match="meta device"):
        insert_rotations(model)
