"""The published model and optimizer once more, written for clarity alone: no scan, no stacking, one matrix at a time.

An oracle for models of which no golden file exists: functions of a state dict by the published names (matrices [out,
in]) and the published configuration.  `test_golden.py` holds it to the golden files too.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden"
FILES = ("additive", "hyperconnect", "looped_full", "looped_truncated", "non_looped")
COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


class Golden:
    """One golden file: `fields` is its configuration, `param`, `grad` and `after3` are state dicts."""

    def __init__(self, name):
        with np.load(GOLDEN / f"{name}.npz") as file:
            content = {key: file[key] for key in file}
        self.fields = json.loads(str(content["config_json"]))
        self.optim = json.loads(str(content["optim_json"]))
        self.counts = json.loads(str(content["param_counts_json"]))
        self.tokens, self.targets = content["tokens"], content["targets"]
        self.logits, self.loss = content["logits"], float(content["loss"])
        self.flops_per_token, self.step_losses = float(content["flops_per_token"]), content["step_losses"]
        self.param, self.grad, self.after3 = (
            {key.removeprefix(f"{kind}/"): content[key] for key in content if key.startswith(f"{kind}/")}
            for kind in ("param", "grad", "after3")
        )


def normalise(x, weight=1.0):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def rotate(x):
    """x [B, T, K], positions counted from 0."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    x1, x2 = x[..., :half], x[..., half:]
    return jnp.concatenate([x1 * cos + x2 * sin, -x1 * sin + x2 * cos], axis=-1)


def attention(fields, arrays, prefix, x):
    q, k, v = (x @ arrays[f"{prefix}.c_{name}.weight"].T for name in "qkv")
    size, group = fields["n_embd"] // fields["n_head"], fields["n_head"] // fields["n_kv_head"]
    allowed = np.tril(np.ones((x.shape[1], x.shape[1]), bool))
    heads = []
    for h in range(fields["n_head"]):
        own, shared = slice(h * size, (h + 1) * size), slice(h // group * size, (h // group + 1) * size)
        query, key = normalise(rotate(q[..., own])), normalise(rotate(k[..., shared]))
        scores = jnp.where(allowed, query @ key.swapaxes(1, 2) / size**0.5, -jnp.inf)
        heads.append(jax.nn.softmax(scores, axis=-1) @ v[..., shared])
    return jnp.concatenate(heads, axis=-1) @ arrays[f"{prefix}.c_proj.weight"].T


def stage(fields, arrays, name, layers, x):
    for i in range(layers):
        prefix = f"transformer.{name}.{i}"
        x = x + attention(fields, arrays, f"{prefix}.attn", normalise(x, arrays[f"{prefix}.n1.weight"]))
        hidden = normalise(x, arrays[f"{prefix}.n3.weight"]) @ arrays[f"{prefix}.mlp.c_fc.weight"].T
        x = x + jnp.maximum(hidden, 0) ** 2 @ arrays[f"{prefix}.mlp.c_proj.weight"].T
    return x


def recur(fields, arrays, e):
    r, mechanism = fields["num_recur"], fields["input_injection"]
    first_with_gradient = r - (fields.get("bptt_k") or r)
    lanes = [e] * fields.get("num_lanes", 1)
    s = jnp.zeros_like(e) if mechanism == "additive" else e
    for i in range(r):
        if mechanism == "hyperconnect":
            u = sum(arrays["lane_alpha"][i, n] * lane for n, lane in enumerate(lanes))
        elif mechanism == "inject_init_prelude":
            u = jnp.concatenate([e, s], axis=-1) @ arrays["inject.weight"].T
        else:
            u = s + e if mechanism == "additive" else s
        u = stage(fields, arrays, "recur", fields["n_recur_block"], u)
        s = normalise(u, arrays["norm_recur.weight"])
        if mechanism == "hyperconnect":
            mixed = [sum(row[m] * lane for m, lane in enumerate(lanes)) for row in arrays["lane_mixing"][i]]
            lanes = [lane + arrays["lane_beta"][i, n] * s for n, lane in enumerate(mixed)]
        if i < first_with_gradient:
            s = jax.lax.stop_gradient(s)
    return sum(lanes) if mechanism == "hyperconnect" else s


def logits(fields, arrays, tokens):
    x = normalise(arrays["transformer.wte.weight"][tokens], arrays["norm_emb.weight"])
    e = stage(fields, arrays, "prelude", fields["n_prelude"], x)
    x = stage(fields, arrays, "coda", fields["n_coda"], recur(fields, arrays, e))
    x = normalise(x, arrays["norm_final.weight"]) @ arrays["lm_head.weight"].T
    cap = fields.get("logit_softcap", 15.0)
    return cap * jnp.tanh(x[..., : fields["vocab_size"]] / cap)


def cross_entropy(logits, targets):
    rows, columns = np.nonzero(targets >= 0)
    return -jnp.mean(jax.nn.log_softmax(logits)[rows, columns, targets[rows, columns]])


def evaluator(fields, tokens, targets):
    """A function of the arrays: ((loss, logits), gradient)."""

    def loss(arrays):
        own = logits(fields, arrays, tokens)
        return cross_entropy(own, targets), own

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


class Optimizer:
    """MuonH and AdamW on a state dict, one parameter at a time, in float64 but for the matrix iterations."""

    def __init__(self, arrays, optim, width):
        self.optim, self.width = optim, (width / optim["d_ref"]) ** -0.5
        self.first = {name: np.zeros(a.shape) for name, a in arrays.items()}
        self.second = {name: np.zeros(a.shape) for name, a in arrays.items()}
        self.norm = {name: np.linalg.norm(a) for name, a in arrays.items()}
        self.count = 0

    def rate(self, name):
        """The rate of an AdamW parameter before the schedule; None for a matrix."""
        o = self.optim
        if name.startswith("lane_"):
            return o["lane_lr"] * self.width
        if name == "transformer.wte.weight":
            return o["embedding_lr"] * self.width
        if name == "lm_head.weight":
            return o["unembedding_lr"] * self.width
        return None if ".c_" in name or name == "inject.weight" else o["norm_lr"] * self.width

    def step(self, arrays, gradients, multiplier):
        self.count += 1
        new = {}
        for name, gradient in gradients.items():
            w, g = arrays[name].astype(np.float64), np.asarray(gradient, np.float64)
            rate = self.rate(name)
            new[name] = (
                self.muonh(name, w, g, multiplier)
                if rate is None
                else self.adamw(name, w, g, rate * multiplier)
            )
        return {name: a.astype(np.float32) for name, a in new.items()}

    def adamw(self, name, w, g, rate):
        b1, b2 = self.optim["adam_betas"]
        self.first[name] = b1 * self.first[name] + (1 - b1) * g
        self.second[name] = b2 * self.second[name] + (1 - b2) * g * g
        mean, square = self.first[name] / (1 - b1**self.count), self.second[name] / (1 - b2**self.count)
        return w - rate * mean / (np.sqrt(square) + self.optim["adam_eps"])

    def muonh(self, name, w, g, multiplier):
        m = self.optim["momentum"]
        self.first[name] = m * self.first[name] + (1 - m) * g
        x = m * self.first[name] + (1 - m) * g
        x = x / (1.02 * np.linalg.norm(x) + 1e-6)
        transposed = x.shape[0] > x.shape[1]
        x = x.T if transposed else x
        for a, b, c in COEFFICIENTS:
            A = x @ x.T
            x = a * x + (b * A + c * A @ A) @ x
        x = x.T if transposed else x
        radius = self.norm[name]
        w = w - self.optim["matrix_lr"] * multiplier * x * radius / np.linalg.norm(x)
        return w * radius / np.linalg.norm(w)
