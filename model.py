"""The GPT that train.py trains: configuration, architecture, first weights, loss, FLOPs, sampling, loading.

The defaults are GPT-2 124M and compute what transformers' GPT-2 computes; the other options (RMSNorm, rotary
positions, SwiGLU, grouped key/value heads, ...) make a Llama-like model of the same code. Not here: the
optimizer, precision (call the model under autocast), compilation (`model.compile()`), a key/value cache.

Tensors carry their shape as a suffix:
    B windows, T positions, C width, H heads, D head width, V vocabulary; N = B * T tokens, flattened.
Keys and values may have fewer heads than H (n_kv_head); V is the padded vocabulary until it is cropped.
"""

import copy
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

INIT_STD = 0.02  # of every weight matrix, as in GPT-2


@dataclass(frozen=True)
class GPTConfig:
    """What shapes a model; zeros that stand for a default are resolved on construction.

    Raises: ValueError that lists every problem.
    """

    vocab_size: int = 50257        # ids 0 .. vocab_size - 1; the matrices have padded_vocab_size rows
    block_size: int = 1024         # positions, at most
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0             # key/value heads, each shared by n_head // n_kv_head heads; 0 = n_head
    head_width: int = 0            # 0 = n_embd // n_head
    n_embd: int = 768
    norm: str = "layernorm"        # 'layernorm', 'rmsnorm'
    norm_eps: float = 1e-5
    position: str = "learned"      # 'learned', 'rope'
    rope_theta: float = 10000.0
    mlp: str = "gelu"              # 'gelu' (by tanh, GPT-2's), 'gelu_erf' (exact, nanoGPT's), 'swiglu'
    mlp_ratio: float = 4.0
    mlp_hidden: int = 0            # 0 = mlp_ratio * n_embd rounded to a multiple of 64
    bias: bool = True              # in linear layers and LayerNorm
    dropout: float = 0.0
    qk_norm: bool = False          # RMSNorm on queries and keys, per head
    value_residual: bool = False   # later layers mix in the values of the first
    logit_cap: float = 0.0         # logits go through cap * tanh(logits / cap); 0 = off
    tie_embeddings: bool = True    # the head is the token embedding

    def __post_init__(self):
        if problems := self._wrong_types() or self._wrong_values():
            raise ValueError("these model settings cannot be used:\n" + "\n".join("  " + p for p in problems))
        rounded = 64 * max(1, int(self.mlp_ratio * self.n_embd / 64 + 0.5))
        resolved = {"n_kv_head": self.n_kv_head or self.n_head,
                    "head_width": self.head_width or self.n_embd // self.n_head,
                    "mlp_hidden": self.mlp_hidden or rounded}
        for name, value in resolved.items():
            object.__setattr__(self, name, value)  # the one way to set a field of a frozen dataclass

    def _wrong_types(self):
        """Problems with types; an int may stand for a float, nothing else for anything."""
        values = [(field.name, field.type, getattr(self, field.name)) for field in fields(self)]
        return [f"{name} is of type {kind.__name__}, got {value!r}" for name, kind, value in values
                if type(value) not in ((int, float) if kind is float else (kind,))]

    def _wrong_values(self):
        """Problems with values and with pairs of them."""
        limits = (("vocab_size block_size n_layer n_head n_embd", lambda value: value >= 1, "at least 1"),
                  ("n_kv_head head_width mlp_hidden logit_cap", lambda value: 0 <= value < math.inf,
                   "0 or more, and finite"),
                  ("norm_eps rope_theta mlp_ratio", lambda value: 0 < value < math.inf, "above 0, and finite"),
                  ("dropout", lambda value: 0 <= value < 1, "at least 0 and below 1"))
        problems = [f"{name} {getattr(self, name)} must be {text}" for names, fits, text in limits
                    for name in names.split() if not fits(getattr(self, name))]
        for name, choices in (("norm", ("layernorm", "rmsnorm")), ("position", ("learned", "rope")),
                              ("mlp", ("gelu", "gelu_erf", "swiglu"))):
            if getattr(self, name) not in choices:
                problems.append(f"{name} {getattr(self, name)!r} is not one of {choices}")
        if self.n_head < 1:
            return problems  # what follows divides by it
        head_width = self.head_width or self.n_embd // self.n_head
        if self.head_width == 0 and self.n_embd % self.n_head:
            problems.append(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}; "
                            f"change one of them or set head_width")
        elif self.position == "rope" and head_width % 2:
            problems.append(f"head_width {head_width} is odd; position 'rope' needs an even one")
        if self.n_kv_head > 0 and self.n_head % self.n_kv_head:
            problems.append(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        return problems

    @property
    def padded_vocab_size(self):
        """vocab_size rounded up to a multiple of 64, which matrix multiplication on GPUs likes better."""
        return -(-self.vocab_size // 64) * 64


class Linear(nn.Linear):
    def reset_parameters(self):
        """Draw nothing: GPT draws its first weights itself, from a generator of its own."""


class Embedding(nn.Embedding):
    def reset_parameters(self):
        """Draw nothing, as in Linear."""


def make_norm(config):
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


def rope_table(config, T, device):
    """Cosines and sines of the rotary angles of positions 0 .. T-1, in float32, each [T, D / 2].

    Computed in each forward, where it costs next to nothing: a buffer would follow the model to half
    precision, in which neighbouring positions are the same.
    Source: RoFormer, arXiv 2104.09864.
    """
    D = config.head_width
    frequencies = config.rope_theta ** (-torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)
    angles = torch.arange(T, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BHTD, cos, sin):
    """Turn each pair (i-th of the head's first half, i-th of its second half) by its angle, in float32."""
    first, second = x_BHTD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention; keys and values may have fewer heads than queries."""

    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        width = config.n_head * config.head_width
        kv_width = config.n_kv_head * config.head_width
        self.widths = (width, kv_width, kv_width)
        self.c_attn = Linear(config.n_embd, sum(self.widths), bias=config.bias)
        self.c_proj = Linear(width, config.n_embd, bias=config.bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
        self.value_mix = nn.Parameter(torch.empty(1)) if config.value_residual and layer > 0 else None

    def forward(self, x_BTC, rope, first_v):
        """Returns y_BTC and, for value_residual, the values of the first layer; there first_v is None."""
        config = self.config
        B, T, _ = x_BTC.shape
        qkv = self.c_attn(x_BTC)
        q, k, v = (part.view(B, T, -1, config.head_width).transpose(1, 2)
                   for part in qkv.split(self.widths, dim=-1))
        if config.qk_norm:
            q, k = self.q_norm(q.float()), self.k_norm(k.float())
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if self.value_mix is not None:
            # Source: value residual learning, arXiv 2410.17897
            v = (1 - self.value_mix) * v + self.value_mix * first_v
        elif config.value_residual:
            first_v = v
        if config.n_kv_head < config.n_head:
            # repeated in memory: memory-efficient attention, all that older GPUs have, knows no groups
            k = k.repeat_interleave(config.n_head // config.n_kv_head, dim=1)
            v = v.repeat_interleave(config.n_head // config.n_kv_head, dim=1)
        q, k, v = q.type_as(qkv), k.type_as(qkv), v.type_as(qkv)  # norm, rotation and mix are float32
        y_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                dropout_p=config.dropout if self.training else 0.0)
        y_BTC = self.c_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))
        return F.dropout(y_BTC, config.dropout, self.training), first_v


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout, self.approximate = config.dropout, "none" if config.mlp == "gelu_erf" else "tanh"
        self.c_fc = Linear(config.n_embd, config.mlp_hidden, bias=config.bias)
        self.c_gate = None
        if config.mlp == "swiglu":
            self.c_gate = Linear(config.n_embd, config.mlp_hidden, bias=config.bias)
        self.c_proj = Linear(config.mlp_hidden, config.n_embd, bias=config.bias)

    def forward(self, x_BTC):
        if self.c_gate is None:
            hidden = F.gelu(self.c_fc(x_BTC), approximate=self.approximate)
        else:
            hidden = F.silu(self.c_gate(x_BTC)) * self.c_fc(x_BTC)
        return F.dropout(self.c_proj(hidden), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x_BTC, rope, first_v):
        y_BTC, first_v = self.attn(self.ln_1(x_BTC), rope, first_v)
        x_BTC = x_BTC + y_BTC
        return x_BTC + self.mlp(self.ln_2(x_BTC)), first_v


class ChunkedLoss(torch.autograd.Function):
    """Head and cross-entropy, `rows` rows of logits at a time in one buffer, with the gradients formed on the way: no
    pass over the logits and no product is done twice. In float32; every loss must have one weight in what is
    differentiated, as in a mean."""

    @staticmethod
    def forward(ctx, x_NC, weight_VC, targets_N, rows):
        losses_N, grad_NC, grad_VC = x_NC.new_empty(len(x_NC)), torch.empty_like(x_NC), torch.empty_like(weight_VC)
        buffer = x_NC.new_empty(min(rows, len(x_NC)), len(weight_VC))
        chunks = zip(*(whole.split(rows) for whole in (x_NC, targets_N, losses_N, grad_NC)))
        for number, (x, targets, losses, grad) in enumerate(chunks):
            p_NV, at = torch.mm(x, weight_VC.mT, out=buffer[:len(x)]), targets[:, None]
            torch.softmax(p_NV, dim=1, out=p_NV)
            p_N = p_NV.gather(1, at).squeeze(1)
            losses.copy_(-p_N.log())
            if (tiny := p_N < 1e-30).any():  # whose logarithm is no longer exact
                losses[tiny] = F.cross_entropy(F.linear(x[tiny], weight_VC), targets[tiny], reduction="none")
            p_NV.scatter_add_(1, at, p_NV.new_full(at.shape, -1))  # now the gradient of the logits
            torch.mm(p_NV, weight_VC, out=grad)
            grad_VC.addmm_(p_NV.mT, x, beta=min(number, 1))  # the first is a product alone
        ctx.save_for_backward(grad_NC, grad_VC)
        return losses_N

    @staticmethod
    def backward(ctx, weights_N):
        grad_NC, grad_VC = ctx.saved_tensors
        assert (weights_N == weights_N[0]).all(), "each loss has the same weight"
        return grad_NC.mul_(weights_N[0]), grad_VC.mul_(weights_N[0]), None, None


class GPT(nn.Module):
    """The model; parameters are float32 and have GPT-2's names.

    activation_checkpointing: training keeps only what enters each block and computes the rest again in
    backward, bit for bit. loss_chunk_tokens: tokens whose logits are held at one time, 0 = all. seed: of the
    first weights; None leaves them as memory was, for whoever loads others.
    """

    def __init__(self, config, activation_checkpointing=False, loss_chunk_tokens=0, seed=0):
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.loss_chunk_tokens = loss_chunk_tokens
        self.wte = Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)
        self.lm_head = None  # a tied head is wte itself, so that the state dict names each tensor once
        if not config.tie_embeddings:
            self.lm_head = Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if seed is not None and not self.wte.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """Draw the weights as GPT-2 does, in the order of the parameters; biases are 0, gains 1, mixes 0.5.

        The generator is its own and on the CPU: the same weights on any device, and the global one stays.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = INIT_STD
                if name.endswith("c_proj.weight"):  # 2 * n_layer of these add up in the residual stream
                    std /= math.sqrt(2 * self.config.n_layer)
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * std)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 0.5 if name.endswith("value_mix") else 1.0)

    def forward(self, idx_BT, targets_BT=None):
        """Returns loss_BT, the cross-entropy of each target; without targets the logits [B, T, vocab_size].

        Both are float32. The loss is over the padded vocabulary: training learns to avoid the surplus ids.
        """
        x_BTC = self.hidden(idx_BT)
        if targets_BT is None:
            return self.logits(x_BTC)[..., :self.config.vocab_size]
        x_NC, targets_N = x_BTC.flatten(0, 1), targets_BT.flatten()
        if self.loss_chunk_tokens == 0:
            return self.loss(x_NC, targets_N).view_as(targets_BT)
        if x_NC.device.type == "cpu" and torch.is_grad_enabled() and not (
                self.config.logit_cap or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()):
            return ChunkedLoss.apply(x_NC, self.head_weight(), targets_N, self.loss_chunk_tokens).view_as(targets_BT)
        chunks = zip(x_NC.split(self.loss_chunk_tokens), targets_N.split(self.loss_chunk_tokens))
        losses = [checkpoint(self.loss, x, targets, use_reentrant=False, preserve_rng_state=False)
                  for x, targets in chunks]
        return torch.cat(losses).view_as(targets_BT)

    def hidden(self, idx_BT):
        """Returns what enters the head, x_BTC.

        Raises: ValueError for a window longer than block_size.
        """
        if (T := idx_BT.shape[1]) > self.config.block_size:
            raise ValueError(f"{T} positions do not fit in block_size {self.config.block_size}; crop them")
        x_BTC = self.wte(idx_BT)
        rope = None
        if self.wpe is None:
            rope = rope_table(self.config, T, idx_BT.device)
        else:
            x_BTC = x_BTC + self.wpe.weight[:T]
        x_BTC = F.dropout(x_BTC, self.config.dropout, self.training)
        first_v = None
        for block in self.h:
            if self.activation_checkpointing and self.training:
                x_BTC, first_v = checkpoint(block, x_BTC, rope, first_v, use_reentrant=False)
            else:
                x_BTC, first_v = block(x_BTC, rope, first_v)
        return self.ln_f(x_BTC)

    def logits(self, x):
        """Returns the head's float32 logits [..., V] of x [..., C], over the padded vocabulary."""
        weight = self.head_weight()
        # autocast shares its half-precision copy of a parameter, but not of a view: so each chunk of the loss
        # has its own copy, and the gradients of the chunks are summed in float32
        logits = F.linear(x, weight.view_as(weight)).float()
        cap = self.config.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def head_weight(self):
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def loss(self, x_NC, targets_N):
        """Head and loss in one, so that a chunk's logits live no longer than this call."""
        return F.cross_entropy(self.logits(x_NC), targets_N, reduction="none")


def expected_first_loss(config):
    """The mean loss before training, in nats: logits start normal with variance n_embd * INIT_STD^2."""
    return math.log(config.padded_vocab_size) + config.n_embd * INIT_STD**2 / 2


@torch.no_grad()
def with_weights(model, weights):
    """The model with other tensors, {name: tensor}, for its parameters; it shares nothing with the first."""
    return copy.deepcopy(model, {id(parameter): nn.Parameter(weights[name], requires_grad=False)
                                 for name, parameter in model.named_parameters()})


def first_loss(model):
    """The mean loss on 256 random tokens, to be held against expected_first_loss; moves no generator but its own."""
    config, was_training = model.config, model.training
    generator, T = torch.Generator().manual_seed(0), min(config.block_size, 256)
    ids = torch.randint(config.vocab_size, (2, -(-256 // T), T), generator=generator).to(model.wte.weight.device)
    model.eval()
    loss = model.forward(*ids).mean().item()
    model.train(was_training)
    return loss


def flops_per_token(config):
    """Training FLOPs per token, forward and backward: 6 per weight of a matrix product, plus attention.

    Attention counts as if it were not causal; a token embedding counts only where it is also the head.
    Source: PaLM, arXiv 2204.02311, appendix B; nanoGPT's estimate_mfu.
    """
    width = config.n_head * config.head_width
    attention = config.n_embd * (2 * width + 2 * config.n_kv_head * config.head_width)
    mlp = config.n_embd * config.mlp_hidden * (3 if config.mlp == "swiglu" else 2)
    head = config.n_embd * config.padded_vocab_size
    return 6 * (config.n_layer * (attention + mlp) + head) + 12 * config.n_layer * width * config.block_size


def parameter_counts(model):
    """Number of parameters by what they are for; 'vectors' are all biases, gains and mixes."""
    counts = dict.fromkeys(("embeddings", "head", "attention", "mlp", "vectors", "total"), 0)
    for name, parameter in model.named_parameters():
        group = ("vectors" if parameter.dim() == 1 else "embeddings" if name.startswith(("wte", "wpe")) else
                 "head" if name.startswith("lm_head") else "attention" if ".attn." in name else "mlp")
        counts[group] += parameter.numel()
        counts["total"] += parameter.numel()
    return counts


@torch.no_grad()
def generate(model, ids, new_tokens, temperature=0.8, top_k=200, generator=None, stop=lambda: False):
    """Returns new_tokens ids sampled after the prompt ids; temperature 0 takes the likeliest, top_k 0 is all.

    The context is the last block_size ids. Draws are made on the CPU, from generator or else the global one,
    so that samples agree over devices. Training mode is left as found. A compiled model runs uncompiled here:
    each new length would be compiled. Ends early once stop() is true.
    Raises: ValueError for an empty prompt, an id outside the vocabulary, a negative temperature or top_k.
    """
    vocab_size, block_size = model.config.vocab_size, model.config.block_size
    if not ids:
        raise ValueError("the prompt is empty; give at least one id, such as the end-of-text id")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"prompt ids run from {min(ids)} to {max(ids)}; vocab_size is {vocab_size}")
    if temperature < 0 or top_k < 0:
        raise ValueError(f"temperature {temperature} and top_k {top_k} must be 0 or more")
    ids, prompt_length = list(ids), len(ids)
    was_training = model.training
    model.eval()
    try:
        for _ in range(new_tokens):
            if stop():
                break
            idx_BT = torch.tensor([ids[-block_size:]], device=model.wte.weight.device)
            logits_V = model.logits(model.hidden(idx_BT)[0, -1]).cpu()[:vocab_size]
            if temperature == 0:
                ids.append(logits_V.argmax().item())
                continue
            if 0 < top_k < vocab_size:
                logits_V[logits_V < logits_V.topk(top_k).values[-1]] = -math.inf
            probabilities_V = F.softmax(logits_V / temperature, dim=-1)
            ids.append(torch.multinomial(probabilities_V, 1, generator=generator).item())
    finally:
        model.train(was_training)
    return ids[prompt_length:]


def load(folder, device="cpu"):
    """Returns the model of a checkpoint, milestone or export, in eval mode, and the tokenizer identity.

    Raises: ValueError that names the file which is missing, unreadable or does not fit.
    """
    description_path, weights_path = Path(folder) / "model.json", Path(folder) / "model.safetensors"
    try:
        description = json.loads(description_path.read_text(encoding="utf-8"))
        weights = load_file(weights_path, device=str(device))
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: of JSON and UTF-8
        raise ValueError(f"{folder} holds no model that can be read; it needs model.json and "
                         f"model.safetensors: {error}") from error
    if (found := description.get("format") if isinstance(description, dict) else None) != 1:
        raise ValueError(f"{description_path} has format {found}; this version reads format 1")
    if not all(isinstance(description.get(name), dict) for name in ("model", "tokenizer")):
        raise ValueError(f"{description_path} lacks model or tokenizer; a checkpoint's or milestone's has both")
    settings = description["model"]
    if unknown := sorted(settings.keys() - {field.name for field in fields(GPTConfig)}):
        raise ValueError(f"{description_path} has model settings that this version does not know: {unknown}")
    with torch.device("meta"):  # nothing is drawn or allocated; the weights of the file become the parameters
        model = GPT(GPTConfig(**settings))
    try:
        weights = {name: tensor.float() for name, tensor in weights.items()}
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{weights_path} does not fit the settings in model.json: {error}") from error
    return model.eval(), description["tokenizer"]
