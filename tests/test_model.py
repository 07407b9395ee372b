"""model.py on tiny shapes: agreement with transformers, architecture, loss, first weights, sampling, loading.

B windows, T positions, C width, H heads, D head width, V vocabulary.
"""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from model import (GPT, MLP, ChunkedLoss, GPTConfig, expected_first_loss, flops_per_token, generate, load,
                   parameter_counts, rope_table, rotate)

GPT2 = dict(vocab_size=101, block_size=32, n_layer=3, n_head=4, n_embd=32)
MODERN = dict(GPT2, n_kv_head=2, norm="rmsnorm", position="rope", mlp="swiglu", bias=False)
EVERYTHING = dict(MODERN, qk_norm=True, value_residual=True, logit_cap=15.0, tie_embeddings=False)
KINDS = pytest.mark.parametrize("kind", [GPT2, MODERN, EVERYTHING], ids=["gpt2", "modern", "everything"])


def perturbed(kind, std=0.1, **options):
    """A model whose every parameter was moved: biases of 0 and gains of 1 would hide mistakes."""
    model = GPT(GPTConfig(**kind), **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def tokens(*shape, vocab_size=101, seed=2):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model, idx_BT, targets_BT):
    model.zero_grad()
    loss_BT = model(idx_BT, targets_BT)
    loss_BT.mean().backward()
    return loss_BT.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(found, wanted, relative):
    """The norm of the difference against the norm of what is wanted."""
    difference = ((found - wanted).norm() / wanted.norm()).item()
    assert difference <= relative, f"relative difference {difference:.2e}, wanted at most {relative:.0e}"


# -- architecture


@pytest.mark.parametrize("changed, activation", [({}, "gelu_new"), ({"mlp": "gelu_erf"}, "gelu")])
def test_default_settings_are_gpt2_as_in_transformers_and_gelu_erf_its_exact_gelu(changed, activation):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=101, n_positions=32, n_embd=32, n_layer=3, n_head=4, activation_function=activation)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    ours = GPT(GPTConfig(**GPT2 | changed)).eval()
    state = {}
    for name, tensor in theirs.transformer.state_dict().items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # buffers of the causal mask, not biases
            continue
        is_conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        state[name] = tensor.T if is_conv1d else tensor
    state["wte.weight"] = F.pad(state["wte.weight"], (0, 0, 0, 128 - 101), value=7.0)
    ours.load_state_dict(state, strict=True)
    idx_BT = tokens(2, 32)
    with torch.no_grad():
        found, wanted = ours(idx_BT), theirs(idx_BT).logits
    assert found.shape == (2, 32, 101) and found.dtype == torch.float32
    assert wanted.abs().max() > 1  # the comparison is not between zeros
    assert (found - wanted).abs().max() <= 1e-5


def test_the_two_gelus_are_the_one_by_tanh_and_the_exact_one():
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    cubic = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    wanted = {"gelu": x * (1 + cubic.tanh()) / 2, "gelu_erf": x * (1 + (x / math.sqrt(2)).erf()) / 2}
    assert (wanted["gelu"] - wanted["gelu_erf"]).abs().max() > 1e-4  # they can be told apart
    for kind, values in wanted.items():
        mlp = MLP(GPTConfig(**GPT2 | {"mlp": kind, "n_embd": 4, "mlp_hidden": 4}))
        with torch.no_grad():
            for layer in (mlp.c_fc, mlp.c_proj):
                layer.weight.copy_(torch.eye(4))
                layer.bias.zero_()
            found = mlp(x.float()[:, None].expand(-1, 4))
        assert (found - values[:, None]).abs().max() < 1e-6


def test_modern_settings_are_llama_as_in_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=101, max_position_embeddings=32, hidden_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, rms_norm_eps=1e-5,
        tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    ours = GPT(GPTConfig(**dict(MODERN, tie_embeddings=False))).eval()
    source = theirs.state_dict()
    state = {"wte.weight": F.pad(source["model.embed_tokens.weight"], (0, 0, 0, 27)),
             "lm_head.weight": F.pad(source["lm_head.weight"], (0, 0, 0, 27)),
             "ln_f.weight": source["model.norm.weight"]}
    for i in range(3):
        layer = f"model.layers.{i}."
        state[f"h.{i}.ln_1.weight"] = source[layer + "input_layernorm.weight"]
        state[f"h.{i}.ln_2.weight"] = source[layer + "post_attention_layernorm.weight"]
        qkv = [source[layer + f"self_attn.{x}_proj.weight"] for x in "qkv"]
        state[f"h.{i}.attn.c_attn.weight"] = torch.cat(qkv)
        state[f"h.{i}.attn.c_proj.weight"] = source[layer + "self_attn.o_proj.weight"]
        for mine, other in (("c_fc", "up_proj"), ("c_gate", "gate_proj"), ("c_proj", "down_proj")):
            state[f"h.{i}.mlp.{mine}.weight"] = source[layer + f"mlp.{other}.weight"]
    ours.load_state_dict(state, strict=True)
    idx_BT = tokens(2, 32)
    with torch.no_grad():
        found, wanted = ours(idx_BT), theirs(idx_BT).logits
    assert wanted.abs().max() > 1
    assert (found - wanted).abs().max() <= 1e-5


@KINDS
def test_a_token_changes_nothing_before_it(kind):
    model = perturbed(kind).eval()
    idx_BT = tokens(1, 32)
    with torch.no_grad():
        before = model(idx_BT)
        for t in (1, 17, 31):
            changed_BT = idx_BT.clone()
            changed_BT[0, t] = (changed_BT[0, t] + 1) % 101
            after = model(changed_BT)
            assert torch.equal(after[:, :t], before[:, :t]), f"token {t} changed a logit before it"
            assert not torch.equal(after[:, t], before[:, t]), f"token {t} changed nothing"


def test_names_and_shapes_of_parameters():
    def shapes(kind):
        return {name: tuple(p.shape) for name, p in GPT(GPTConfig(**kind)).named_parameters()}

    assert shapes(dict(GPT2, n_layer=1)) == {
        "wte.weight": (128, 32), "wpe.weight": (32, 32),
        "h.0.ln_1.weight": (32,), "h.0.ln_1.bias": (32,),
        "h.0.attn.c_attn.weight": (96, 32), "h.0.attn.c_attn.bias": (96,),
        "h.0.attn.c_proj.weight": (32, 32), "h.0.attn.c_proj.bias": (32,),
        "h.0.ln_2.weight": (32,), "h.0.ln_2.bias": (32,),
        "h.0.mlp.c_fc.weight": (128, 32), "h.0.mlp.c_fc.bias": (128,),
        "h.0.mlp.c_proj.weight": (32, 128), "h.0.mlp.c_proj.bias": (32,),
        "ln_f.weight": (32,), "ln_f.bias": (32,)}
    block = {"ln_1.weight": (32,), "attn.c_attn.weight": (64, 32), "attn.c_proj.weight": (32, 32),
             "attn.q_norm.weight": (8,), "attn.k_norm.weight": (8,), "ln_2.weight": (32,),
             "mlp.c_fc.weight": (128, 32), "mlp.c_gate.weight": (128, 32), "mlp.c_proj.weight": (32, 128)}
    wanted = {f"h.{i}.{name}": shape for i in (0, 1) for name, shape in block.items()}
    wanted |= {"wte.weight": (128, 32), "ln_f.weight": (32,), "lm_head.weight": (128, 32),
               "h.1.attn.value_mix": (1,)}
    assert shapes(dict(EVERYTHING, n_layer=2)) == wanted


@KINDS
def test_state_dict_is_the_parameters(kind):
    model = GPT(GPTConfig(**kind))
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_parameter_counts():
    with torch.device("meta"):
        gpt2 = GPT(GPTConfig())
        modern = GPT(GPTConfig(vocab_size=49152, block_size=2048, n_layer=22, n_embd=576, n_head=9,
                               n_kv_head=3, norm="rmsnorm", position="rope", mlp="swiglu", mlp_hidden=1536,
                               bias=False))
    assert all(parameter.is_meta for parameter in gpt2.parameters())
    assert parameter_counts(gpt2) == {
        "embeddings": 50304 * 768 + 1024 * 768, "head": 0, "attention": 12 * (768 * 2304 + 768 * 768),
        "mlp": 12 * 2 * 768 * 3072, "vectors": 12 * (4 * 768 + 2304 + 768 + 3072 + 768) + 2 * 768,
        "total": 124_475_904}
    assert parameter_counts(modern)["total"] == 106_194_240
    counts = parameter_counts(GPT(GPTConfig(**EVERYTHING)))
    assert counts["head"] == 128 * 32
    assert counts["vectors"] == 3 * (2 * 32 + 2 * 8) + 2 + 32
    assert sum(counts.values()) == 2 * counts["total"]


def test_grouped_heads_are_full_heads_with_repeated_weights():
    grouped = perturbed(MODERN).eval()
    full = GPT(GPTConfig(**dict(MODERN, n_kv_head=4))).eval()
    state = grouped.state_dict()
    for i in range(3):
        q, k, v = state[f"h.{i}.attn.c_attn.weight"].split([32, 16, 16])
        k, v = (w.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32) for w in (k, v))
        state[f"h.{i}.attn.c_attn.weight"] = torch.cat([q, k, v])
    full.load_state_dict(state)
    idx_BT = tokens(2, 32)
    with torch.no_grad():
        assert (full(idx_BT) - grouped(idx_BT)).abs().max() <= 1e-5


def test_head_width_may_differ_from_width_over_heads():
    config = GPTConfig(**dict(MODERN, head_width=20))
    model = GPT(config)
    assert model.h[0].attn.c_attn.weight.shape == ((4 + 2 * 2) * 20, 32)
    assert model.h[0].attn.c_proj.weight.shape == (32, 4 * 20)
    assert model(tokens(1, 5)).shape == (1, 5, 101)


def test_rope_sees_relative_positions_only():
    config = GPTConfig(**MODERN)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(5))
    cos_TD, sin_TD = rope_table(config, 32, "cpu")
    q_TD = rotate(q.expand(1, 1, 32, 8), cos_TD, sin_TD)[0, 0]
    k_TD = rotate(k.expand(1, 1, 32, 8), cos_TD, sin_TD)[0, 0]
    scores_TT = q_TD @ k_TD.T
    for distance in range(32):
        diagonal = scores_TT.diagonal(-distance)
        assert (diagonal - diagonal[0]).abs().max() <= 1e-5
    assert (scores_TT[:, 0] - scores_TT[0, 0]).abs().max() > 0.1  # but it does see them
    assert torch.equal(q_TD[0], q)  # position 0 is not turned
    assert (q_TD.norm(dim=-1) - q.norm()).abs().max() <= 1e-5
    # the first half turns with the second half, the first pair by one radian per position
    assert torch.allclose(q_TD[1, 0], q[0] * math.cos(1) - q[4] * math.sin(1))
    assert torch.allclose(q_TD[1, 4], q[4] * math.cos(1) + q[0] * math.sin(1))


def test_qk_norm_makes_the_size_of_queries_and_keys_irrelevant():
    model = perturbed(dict(GPT2, qk_norm=True, bias=False)).eval()
    plain = perturbed(dict(GPT2, bias=False)).eval()
    idx_BT = tokens(1, 32)
    with torch.no_grad():
        for m, unchanged in ((model, True), (plain, False)):
            before = m(idx_BT)
            for block in m.h:
                block.attn.c_attn.weight[:64] *= 10
            assert ((m(idx_BT) - before).abs().max() <= 1e-4) == unchanged


def test_value_residual_mixes_in_the_first_layers_values():
    kind = dict(MODERN, value_residual=True)
    model = perturbed(kind).eval()
    idx_BT = tokens(1, 32)
    state = model.state_dict()
    plain = GPT(GPTConfig(**MODERN)).eval()
    plain.load_state_dict({name: tensor for name, tensor in state.items() if "value_mix" not in name})
    assert [name for name in state if "value_mix" in name] == ["h.1.attn.value_mix", "h.2.attn.value_mix"]
    assert GPT(GPTConfig(**kind)).h[1].attn.value_mix.tolist() == [0.5]
    with torch.no_grad():
        mixes = [block.attn.value_mix for block in model.h[1:]]
        for mix in mixes:
            mix.fill_(0.0)
        assert torch.equal(model(idx_BT), plain(idx_BT))
        for mix in mixes:
            mix.fill_(1.0)
        before = model(idx_BT)
        for block in model.h[1:]:
            block.attn.c_attn.weight[-16:] = 0.0  # own values of the later layers are not used at all
        assert torch.equal(model(idx_BT), before)
        for mix in mixes:
            mix.fill_(0.25)
        assert not torch.equal(model(idx_BT), before)


def test_logit_cap_bounds_logits_and_loss():
    model = perturbed(dict(GPT2, logit_cap=5.0), std=1.0).eval()
    idx_BT, targets_BT = tokens(2, 32), tokens(2, 32, seed=4)
    with torch.no_grad():
        logits_BTV = model(idx_BT)
        loss_BT = model(idx_BT, targets_BT)
    assert 4.9 < logits_BTV.abs().max() <= 5.0
    assert loss_BT.max() <= 10 + math.log(128)


# -- loss


@KINDS
def test_loss_is_the_cross_entropy_of_each_token_over_the_padded_vocabulary(kind):
    model = perturbed(kind).eval()
    idx_BT, targets_BT = tokens(2, 32), tokens(2, 32, seed=4)
    seen = []
    hook = model.ln_f.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        loss_BT, logits_BTV = model(idx_BT, targets_BT), model(idx_BT)
    hook.remove()
    head = model.wte.weight if model.config.tie_embeddings else model.lm_head.weight
    wanted_BTV = (seen[0] @ head.T).double()
    if model.config.logit_cap:
        wanted_BTV = 15.0 * torch.tanh(wanted_BTV / 15.0)
    assert wanted_BTV.shape[-1] == 128 and (wanted_BTV[..., :101] - logits_BTV).abs().max() <= 1e-5
    wanted_BT = wanted_BTV.logsumexp(-1) - wanted_BTV.gather(-1, targets_BT[..., None])[..., 0]
    assert loss_BT.shape == (2, 32) and loss_BT.dtype == torch.float32
    assert (loss_BT - wanted_BT).abs().max() <= 1e-5


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", [GPT2, MODERN], ids=["gpt2", "modern"])
def test_first_loss_is_as_expected(kind, tie_embeddings):
    config = GPTConfig(**dict(kind, vocab_size=500, n_embd=128, block_size=64, tie_embeddings=tie_embeddings))
    assert expected_first_loss(config) == pytest.approx(math.log(512) + 128 * 0.0004 / 2)
    with torch.no_grad():
        loss_BT = GPT(config)(tokens(8, 64, vocab_size=500), tokens(8, 64, vocab_size=500, seed=4))
    assert abs(loss_BT.mean().item() - expected_first_loss(config)) <= 0.05


@pytest.mark.parametrize("chunk", [3, 7, 16, 63, 64, 1000])
@pytest.mark.parametrize("kind", [GPT2, EVERYTHING], ids=["gpt2", "everything"])
def test_chunked_loss_equals_whole_loss(kind, chunk):
    idx_BT, targets_BT = tokens(2, 32), tokens(2, 32, seed=4)
    wanted_BT, wanted = gradients(perturbed(kind), idx_BT, targets_BT)
    found_BT, found = gradients(perturbed(kind, loss_chunk_tokens=chunk), idx_BT, targets_BT)
    assert_close(found_BT, wanted_BT, 4e-7)
    assert found.keys() == wanted.keys()
    everything = torch.cat([g.flatten() for g in wanted.values()])
    assert_close(torch.cat([g.flatten() for g in found.values()]), everything, 4e-7)
    head = "wte.weight" if "lm_head.weight" not in wanted else "lm_head.weight"
    assert_close(found[head], wanted[head], 4e-7)


def test_chunked_loss_never_holds_all_logits(monkeypatch):
    rows = []
    whole = F.cross_entropy

    def spy(logits_NV, *args, **kwargs):
        rows.append(len(logits_NV))
        return whole(logits_NV, *args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", spy)
    for chunk, wanted in ((0, [64]), (24, [24, 24, 16])):
        model = GPT(GPTConfig(**dict(GPT2, mlp_hidden=64, logit_cap=30.0)), loss_chunk_tokens=chunk)
        rows.clear()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            loss_BT = model(tokens(2, 32), tokens(2, 32, seed=4))
        assert rows == wanted
        assert any(shape[-1:] == (128,) for shape in kept) == (chunk == 0)  # logits kept for backward
        loss_BT.sum().backward()
        assert sorted(rows) == sorted(wanted if chunk == 0 else wanted * 2)  # each chunk again in backward


def test_gradients_formed_on_the_way_hold_one_chunk_of_logits(monkeypatch):
    sizes, softmax = [], torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda p_NV, **more: sizes.append(p_NV.shape) or softmax(p_NV, **more))
    model, kept = GPT(GPTConfig(**dict(GPT2, mlp_hidden=64)), loss_chunk_tokens=24), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        loss_BT = model(tokens(2, 32), tokens(2, 32, seed=4))
    assert sizes == [(24, 128), (24, 128), (16, 128)] and all(shape[-1:] != (128,) for shape in kept)
    loss_BT.mean().backward()
    assert len(sizes) == 3, "nothing is computed again"
    with pytest.raises(AssertionError, match="the same weight"):
        (model(tokens(2, 32), tokens(2, 32, seed=4)) * torch.arange(32)).sum().backward()


def test_a_loss_whose_probability_is_next_to_nothing_is_exact():
    """Where the logarithm of a float32 probability would be infinite or coarse: a run that diverges is told so."""
    x_NC, weight_VC = torch.tensor([[300.0], [95.0], [40.0], [1.0]]), torch.tensor([[1.0], [0.0]], requires_grad=True)
    targets_N = torch.ones(4, dtype=torch.int64)
    found = ChunkedLoss.apply(x_NC, weight_VC, targets_N, 3)
    assert torch.equal(found, F.cross_entropy(x_NC @ weight_VC.mT, targets_N, reduction="none"))
    assert found[:2].tolist() == [300.0, 95.0]


def test_chunked_gradients_are_summed_in_float32_under_autocast():
    """Chunks that shared one bfloat16 copy of the head would add up their gradients in bfloat16."""
    idx_BT, targets_BT = tokens(4, 32), tokens(4, 32, seed=4)
    kind = dict(GPT2, tie_embeddings=False)
    with torch.autocast("cpu", torch.bfloat16):
        _, whole = gradients(perturbed(kind), idx_BT, targets_BT)
        _, chunked = gradients(perturbed(kind, loss_chunk_tokens=2), idx_BT, targets_BT)
    _, exact = gradients(perturbed(kind), idx_BT, targets_BT)
    error = {name: (grad["lm_head.weight"] - exact["lm_head.weight"]).norm() for name, grad in
             (("whole", whole), ("chunked", chunked))}
    assert error["chunked"] <= 1.2 * error["whole"], error


@KINDS
def test_activation_checkpointing_changes_no_bit(kind):
    idx_BT, targets_BT = tokens(2, 32), tokens(2, 32, seed=4)
    results = []
    for on in (False, True):
        model = perturbed(dict(kind, dropout=0.3), activation_checkpointing=on)
        torch.manual_seed(11)
        results.append(gradients(model, idx_BT, targets_BT) + (torch.get_rng_state(),))
    (loss_BT, wanted, rng), (found_BT, found, found_rng) = results
    assert torch.equal(found_BT, loss_BT) and torch.equal(found_rng, rng)
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def test_activation_checkpointing_recomputes_each_block():
    model = GPT(GPTConfig(**GPT2), activation_checkpointing=True)
    calls = []
    for block in model.h:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model(tokens(1, 8), tokens(1, 8)).sum().backward()
    assert len(calls) == 6
    model.eval()
    model(tokens(1, 8), tokens(1, 8))
    assert len(calls) == 9


def test_dropout_is_off_in_evaluation_and_on_in_training():
    model = perturbed(dict(GPT2, dropout=0.5))
    idx_BT, targets_BT = tokens(2, 32), tokens(2, 32, seed=4)
    torch.manual_seed(1)
    assert not torch.equal(model(idx_BT, targets_BT), model(idx_BT, targets_BT))
    model.eval()
    state = torch.get_rng_state()
    with torch.no_grad():
        first_BT, second_BT = model(idx_BT, targets_BT), model(idx_BT, targets_BT)
    assert torch.equal(first_BT, second_BT) and torch.equal(torch.get_rng_state(), state)
    plain = perturbed(GPT2).eval()
    assert torch.equal(plain(idx_BT, targets_BT), first_BT)


def test_training_without_dropout_draws_nothing():
    model = GPT(GPTConfig(**EVERYTHING), activation_checkpointing=True, loss_chunk_tokens=24)
    state = torch.get_rng_state()
    model(tokens(2, 32), tokens(2, 32, seed=4)).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


@KINDS
@pytest.mark.filterwarnings("error")
def test_autocast_keeps_the_loss_in_float32(kind):
    model = perturbed(kind, loss_chunk_tokens=24, activation_checkpointing=True)
    idx_BT, targets_BT = tokens(2, 32), tokens(2, 32, seed=4)
    wanted_BT = model(idx_BT, targets_BT)
    with torch.autocast("cpu", torch.bfloat16):
        loss_BT, logits_BTV = model(idx_BT, targets_BT), model(idx_BT)
    assert loss_BT.dtype == logits_BTV.dtype == torch.float32
    assert (loss_BT - wanted_BT).abs().max() <= 0.5
    assert abs(loss_BT.mean() - wanted_BT.mean()) <= 0.02
    loss_BT.mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_inference_mode_and_compile():
    model = perturbed(dict(EVERYTHING, bias=True), loss_chunk_tokens=24, activation_checkpointing=True)
    idx_BT, targets_BT = tokens(2, 32), tokens(2, 32, seed=4)
    wanted_BT, wanted = gradients(model, idx_BT, targets_BT)
    with torch.inference_mode():
        assert torch.equal(model(idx_BT, targets_BT), wanted_BT)
    names = list(model.state_dict())
    model.compile(backend="aot_eager", fullgraph=True)
    found_BT, found = gradients(model, idx_BT, targets_BT)
    assert_close(found_BT, wanted_BT, 1e-6)
    for name in wanted:
        assert (found[name] - wanted[name]).abs().max() <= 1e-6, name
    assert list(model.state_dict()) == names
    torch.compiler.reset()


def test_a_window_longer_than_block_size_is_refused():
    with pytest.raises(ValueError, match="33 positions do not fit in block_size 32"):
        GPT(GPTConfig(**GPT2))(tokens(1, 33))


def test_flops_per_token_by_hand():
    # GPT-2 124M: per layer 768 x 2304 (q, k, v) + 768 x 768 (projection) + 2 x 768 x 3072 (mlp) = 7,077,888
    # weights; head 50,304 x 768 = 38,633,472; together 12 x 7,077,888 + 38,633,472 = 123,568,128, at 6 FLOPs
    # each 741,408,768.
    # Attention: 12 layers x 12 x 768 x 1,024 = 113,246,208.
    assert flops_per_token(GPTConfig()) == 741_408_768 + 113_246_208 == 854_654_976
    # an untied head does the same work; position embeddings and norms do none
    assert flops_per_token(GPTConfig(tie_embeddings=False)) == 854_654_976
    # grouped heads, swiglu: per layer 64 x (4 + 2 + 2) x 24 = 12,288, 96 x 64 = 6,144, 3 x 64 x 192 = 36,864;
    # head 128 x 64 = 8,192; 2 layers: 6 x (2 x 55,296 + 8,192) = 712,704; attention 12 x 2 x 96 x 32 = 73,728
    config = GPTConfig(vocab_size=101, block_size=32, n_layer=2, n_head=4, n_kv_head=2, head_width=24,
                       n_embd=64, mlp="swiglu", mlp_hidden=192, position="rope", bias=False)
    assert flops_per_token(config) == 712_704 + 73_728


# -- configuration and first weights


def test_config_resolves_zeros_and_survives_json():
    config = GPTConfig()
    assert (config.n_kv_head, config.head_width, config.mlp_hidden) == (12, 64, 3072)
    assert config.padded_vocab_size == 50304
    assert GPTConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert GPTConfig(n_embd=16, n_head=2, mlp_ratio=1.0).mlp_hidden == 64
    assert GPTConfig(n_embd=160, n_head=2, mlp_ratio=2.7).mlp_hidden == 448  # 432 lies nearest to 448
    assert GPTConfig(n_embd=100, n_head=2, mlp_hidden=123).mlp_hidden == 123
    assert GPTConfig(vocab_size=64).padded_vocab_size == 64
    assert GPTConfig(vocab_size=65).padded_vocab_size == 128


def test_config_errors_list_all_problems():
    with pytest.raises(ValueError) as error:
        GPTConfig(vocab_size=0, n_embd=100, n_head=6, n_kv_head=4, norm="layer", position="rotary",
                  mlp="relu", dropout=1.0, logit_cap=-1.0)
    text = str(error.value)
    for part in ("vocab_size 0", "n_embd 100", "n_head 6", "n_kv_head 4", "norm 'layer'", "'rmsnorm'",
                 "position 'rotary'", "mlp 'relu'", "dropout 1.0", "logit_cap -1.0"):
        assert part in text, part
    assert len(text.splitlines()) == 1 + 8


@pytest.mark.parametrize("wrong, part", [
    (dict(n_layer=0), "n_layer"), (dict(block_size=-1), "block_size"), (dict(n_head=0), "n_head"),
    (dict(head_width=-8), "head_width"), (dict(mlp_ratio=0.0), "mlp_ratio"), (dict(norm_eps=0.0), "norm_eps"),
    (dict(norm_eps=math.nan), "norm_eps"), (dict(rope_theta=-1.0), "rope_theta"),
    (dict(dropout=-0.1), "dropout"),
    (dict(position="rope", head_width=7), "head_width 7"), (dict(n_head=12, n_kv_head=5), "n_kv_head 5"),
    (dict(logit_cap=math.inf), "logit_cap"), (dict(n_layer="12"), "n_layer"), (dict(bias=1), "bias"),
    (dict(n_embd=768.0), "n_embd"), (dict(position="rope", n_embd=15, n_head=3), "head_width 5")])
def test_config_refuses(wrong, part):
    with pytest.raises(ValueError, match=part):
        GPTConfig(**wrong)


def test_first_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = GPT(GPTConfig(**EVERYTHING), seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again = GPT(GPTConfig(**EVERYTHING), seed=3, loss_chunk_tokens=8).state_dict()
    other = GPT(GPTConfig(**EVERYTHING), seed=4).state_dict()
    for name, tensor in first.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(again[name], tensor), name
        assert torch.equal(other[name], tensor) == (tensor.dim() == 1), name


@pytest.mark.parametrize("kind", [GPT2, dict(EVERYTHING, bias=True)], ids=["gpt2", "everything"])
def test_first_weights_have_the_std_they_should(kind):
    model = GPT(GPTConfig(**dict(kind, n_layer=8, n_embd=128)))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) <= 5 * std / math.sqrt(parameter.numel()), name
        else:
            value = 0.0 if name.endswith("bias") else 0.5 if name.endswith("value_mix") else 1.0
            assert (parameter == value).all(), name


def test_construction_on_meta_draws_nothing():
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = GPT(GPTConfig(**EVERYTHING))
        idx_BT = torch.zeros(2, 32, dtype=torch.long)
        assert model(idx_BT, idx_BT).shape == (2, 32)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert torch.equal(torch.get_rng_state(), state)


# -- sampling


@KINDS
def test_generation_is_a_function_of_its_generator(kind):
    model = perturbed(dict(kind, dropout=0.5)).train()

    def draw(seed):
        return generate(model, [1, 2, 3], 40, generator=torch.Generator().manual_seed(seed))

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw(7)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert len(first) == 40 and all(type(i) is int and 0 <= i < 101 for i in first)
    torch.manual_seed(2)
    assert draw(7) == first and draw(8) != first
    model.eval()
    assert draw(7) == first and not model.training


def test_generation_samples_from_the_models_distribution():
    model = perturbed(dict(GPT2, vocab_size=5)).eval()
    with torch.no_grad():
        wanted = F.softmax(model(torch.tensor([[3, 1]]))[0, -1] / 2.0, dim=-1)
    generator = torch.Generator().manual_seed(1)
    drawn = [generate(model, [3, 1], 1, 2.0, top_k=0, generator=generator)[0] for _ in range(1500)]
    found = torch.bincount(torch.tensor(drawn), minlength=5) / 1500
    assert (found - wanted).abs().max() <= 0.05
    best = set(wanted.topk(2).indices.tolist())
    drawn = {generate(model, [3, 1], 1, 5.0, top_k=2, generator=generator)[0] for _ in range(50)}
    assert drawn == best


def test_greedy_generation_takes_the_best_and_crops_the_context():
    model = perturbed(GPT2).eval()
    ids = tokens(40).tolist()
    wanted = list(ids)
    with torch.no_grad():
        for _ in range(5):
            wanted.append(model(torch.tensor([wanted[-32:]]))[0, -1].argmax().item())
    assert generate(model, ids, 5, temperature=0) == wanted[40:]
    assert len(ids) == 40  # the prompt is not written to


def test_padded_ids_are_never_sampled():
    model = GPT(GPTConfig(**dict(GPT2, tie_embeddings=False)))
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.fill_(1.0)
        model.lm_head.weight[101:] = 1000.0  # logits of 32,000 on ids that stand for nothing
    assert model.logits(torch.ones(1, 32)).argmax() >= 101
    for temperature in (0.0, 0.8, 100.0):
        generator = torch.Generator().manual_seed(1)
        assert max(generate(model, [0], 60, temperature, top_k=0, generator=generator)) < 101


def test_generation_refuses_what_it_cannot_do():
    model = GPT(GPTConfig(**GPT2)).train()
    for ids, options, part in (([], {}, "prompt"), ([3, 101], {}, "101"), ([-1], {}, "-1"),
                               ([1], {"temperature": -1.0}, "temperature"), ([1], {"top_k": -1}, "top_k")):
        with pytest.raises(ValueError, match=part):
            generate(model, ids, 3, **options)
    assert model.training


# -- a model from a folder


def write_folder(folder, model, format=1, **settings):
    description = {"format": format, "model": dataclasses.asdict(model.config) | settings,
                   "tokenizer": {"kind": "bytes"}}
    (folder / "model.json").write_text(json.dumps(description))
    save_file(model.state_dict(), folder / "model.safetensors")


@KINDS
def test_load_gives_back_the_model(kind, tmp_path):
    model = perturbed(kind)
    write_folder(tmp_path, model)
    state = torch.get_rng_state()
    loaded, tokenizer = load(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert tokenizer == {"kind": "bytes"} and loaded.config == model.config and not loaded.training
    found = dict(loaded.named_parameters())
    assert list(found) == list(model.state_dict())
    for name, wanted in model.named_parameters():
        assert torch.equal(found[name], wanted) and found[name].requires_grad
    idx_BT = tokens(2, 32)
    assert torch.equal(loaded(idx_BT), model.eval()(idx_BT))


def test_load_says_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="model.json"):
        load(tmp_path)
    model = GPT(GPTConfig(**GPT2))
    (tmp_path / "model.json").write_text('{"format": 1, "mo')
    with pytest.raises(ValueError, match="model.json"):
        load(tmp_path)
    (tmp_path / "model.json").write_text("[]")
    with pytest.raises(ValueError, match="model.safetensors"):
        load(tmp_path)
    write_folder(tmp_path, model)
    (tmp_path / "model.json").write_text("[]")
    with pytest.raises(ValueError, match="format None"):
        load(tmp_path)
    write_folder(tmp_path, model, format=2)
    with pytest.raises(ValueError, match="format 2"):
        load(tmp_path)
    write_folder(tmp_path, model, n_wings=2)
    with pytest.raises(ValueError, match="n_wings"):
        load(tmp_path)
    write_folder(tmp_path, model, n_layer=4)
    with pytest.raises(ValueError, match="h.3.ln_1.weight"):
        load(tmp_path)
    write_folder(tmp_path, model)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="model.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors"):
        load(tmp_path)
