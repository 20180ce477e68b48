"""Densities, differential equations, operators, spikes, adapters, policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heldin_lab.zoo.entry import Batch, Entry, call, lib, normal

__all__ = ["ENTRIES"]


class Surprise(nn.Module):
    """The negative log density of each row."""

    def __init__(self, density: nn.Module, of: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.density, self._of = density, of

    def forward(self, x: Tensor) -> Tensor:
        return -self._of(self.density, x)


def zuko(name: str, **options: Any) -> Entry:
    def make() -> nn.Module:
        flow = getattr(lib("zuko.flows"), name)(3, 0, transforms=2, hidden_features=(8,), **options)
        return Surprise(flow, lambda flow, x: flow().log_prob(x))

    return Entry("zuko", name, make, normal(3))


def nflows(name: str) -> Entry:
    def make() -> nn.Module:
        t, base = lib("nflows.transforms"), lib("nflows.distributions").StandardNormal([4])
        steps = {
            "MAF": lambda: [
                t.MaskedAffineAutoregressiveTransform(features=4, hidden_features=8, num_blocks=1),
                t.RandomPermutation(features=4),
            ],
            "spline": lambda: [
                t.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
                    features=4, hidden_features=8, num_blocks=1, num_bins=4, tails="linear"
                ),
            ],
            "LU": lambda: [t.LULinear(4), t.Sigmoid(), t.Logit()],
        }
        flow = lib("nflows.flows").Flow(t.CompositeTransform(steps[name]()), base)
        return Surprise(flow, lambda flow, x: flow.log_prob(x))

    return Entry("nflows", name, make, normal(4))


def normflows(name: str) -> Entry:
    def make() -> nn.Module:
        nf = lib("normflows")
        net = nf.nets.MLP([2, 8, 4], init_zeros=False)
        steps = {
            "RealNVP": lambda: [nf.flows.AffineCouplingBlock(net), nf.flows.Permute(4)],
            "Glow": lambda: [nf.flows.AffineCouplingBlock(net), nf.flows.LULinearPermute(4)],
            "planar": lambda: [nf.flows.Planar((4,)), nf.flows.Planar((4,))],
            "spline": lambda: [nf.flows.CoupledRationalQuadraticSpline(4, 1, 8)],
        }
        model = nf.NormalizingFlow(nf.distributions.DiagGaussian(4), steps[name]())
        if name == "planar":  # only its direct way has a formula
            return Surprise(model, lambda model, z: _sampled(model, z))
        return Surprise(model, lambda model, x: model.log_prob(x))

    return Entry("normflows", name, make, normal(4))


def _sampled(model: Any, z: Tensor) -> Tensor:
    out: Tensor
    out, log_det = model.forward_and_log_det(z)
    surprise: Tensor = out.square().sum(1) + log_det
    return surprise


class Flowing(nn.Module):
    """The state of an equation at its end."""

    def __init__(self, solver: str, method: str) -> None:
        super().__init__()
        self.speed = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
        self.solver, self.method = solver, method

    def forward(self, x: Tensor) -> Any:
        times = torch.linspace(0, 1, 3, dtype=x.dtype)
        f = _Speed(self.speed)
        return getattr(lib("torchdiffeq"), self.solver)(f, x, times, method=self.method)[-1]


class _Speed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, t: Tensor, x: Tensor) -> Any:
        return self.net(x)


def operator(name: str, *shape: int, **options: Any) -> Entry:
    def make() -> Any:
        return getattr(lib("neuralop.models"), name)(**options)

    return Entry("neuraloperator", name, make, normal(*shape), double=False)


def spiking(kind: str) -> nn.Module:
    s = lib("snntorch")
    return _Spikes(getattr(s, kind)(beta=0.9, **({"alpha": 0.8} if kind == "Synaptic" else {})))


class _Spikes(nn.Module):
    def __init__(self, neuron: Any) -> None:
        super().__init__()
        self.layer, self.neuron, self.out = nn.Linear(4, 6), neuron, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = self.neuron.reset_mem()
        state = state if isinstance(state, tuple) else (state,)
        total = torch.zeros(len(x), 2, dtype=x.dtype)
        for t in range(x.shape[1]):
            spikes, *state = self.neuron(self.layer(x[:, t]), *state)
            total = total + self.out(spikes)
        return total


def adapted(kind: str, **options: Any) -> Entry:
    """A small GPT-2, of which peft trains a part."""

    def make() -> Any:
        t, peft = lib("transformers"), lib("peft")
        config = t.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=40)
        return peft.get_peft_model(
            t.GPT2LMHeadModel(config), getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        )

    return Entry("peft", kind, make, lambda m: {"input_ids": torch.randint(0, 32, (m, 8))})


def sentences() -> nn.Module:
    s, t = lib("sentence_transformers"), lib("transformers")
    models = s.models if hasattr(s, "models") else lib("sentence_transformers.models")
    bert = t.BertModel(t.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32))  # fmt: skip
    return nn.Sequential(_Words(bert), models.Pooling(16, "mean"), models.Normalize())


class _Words(nn.Module):
    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        words = self.bert(**features).last_hidden_state
        return {"token_embeddings": words, "attention_mask": features["attention_mask"]}


def padded_words(m: int) -> Batch:
    mask = (torch.arange(8) < torch.randint(3, 9, (m, 1))).long()
    return ({"input_ids": torch.randint(3, 32, (m, 8)) * mask, "attention_mask": mask},)


def sentence_losses(model: nn.Module, batch: Batch, m: int) -> Tensor:
    return _curved(call(model, batch)["sentence_embedding"])


def _curved(out: Tensor) -> Tensor:
    return out.flatten(1).sin().mean(1) + out.flatten(1).square().mean(1)


def gaussian_process() -> nn.Module:
    g = lib("gpytorch")

    class Model(g.models.ExactGP):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            x = torch.linspace(0, 1, 4)[:, None].double()
            likelihood = g.likelihoods.GaussianLikelihood()
            super().__init__(x, x[:, 0].sin(), likelihood)
            self.mean_module = g.means.ConstantMean()
            self.covar_module = g.kernels.RBFKernel()

        def forward(self, x: Tensor) -> Any:
            return g.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return _Marginal(Model())


class _Marginal(nn.Module):
    """The covariance of all rows, which are one sample of a function."""

    def __init__(self, process: Any) -> None:
        super().__init__()
        self.process = process

    def forward(self, x: Tensor) -> Any:
        out = self.process.forward(x)
        return out.covariance_matrix.inverse() @ (x[:, 0] - out.mean)


def policy(name: str) -> Entry:
    def make() -> Any:
        m = lib("torchrl.modules")
        kinds: dict[str, Any] = {
            "MLP": lambda: m.MLP(in_features=4, out_features=2, num_cells=[8, 8]),
            "ConvNet": lambda: m.ConvNet(
                in_features=3, num_cells=[4, 4], kernel_sizes=[3, 3], strides=[1, 1]),
            "NoisyLinear": lambda: nn.Sequential(m.NoisyLinear(4, 6), nn.Tanh(),
                                                 m.NoisyLinear(6, 2)),
            "LSTM": lambda: _First(m.LSTM(4, 6, batch_first=True)),
            "GRU": lambda: _First(m.GRU(4, 6, batch_first=True)),
        }  # fmt: skip
        return kinds[name]()

    shape = {"ConvNet": (3, 8, 8), "LSTM": (5, 4), "GRU": (5, 4)}.get(name, (4,))
    return Entry("torchrl", name, make, normal(*shape))


class _First(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x)[0]


ENTRIES = [
    zuko("NSF", bins=4),
    zuko("MAF"),
    zuko("NICE"),
    zuko("NAF", signal=4),
    zuko("SOSPF"),
    zuko("BPF"),
    zuko("GF", components=3),
    Entry("zuko", "CNF", lambda: Surprise(
        lib("zuko.flows").CNF(3, 0, hidden_features=(8,)), lambda flow, x: flow().log_prob(x)),
        normal(3)),
    nflows("MAF"),
    nflows("spline"),
    nflows("LU"),
    normflows("RealNVP"),
    normflows("Glow"),
    normflows("planar"),
    normflows("spline"),
    *(Entry("torchdiffeq", f"{solver}, {method}",
            partial(Flowing, solver, method), normal(3))
      for solver, method in (("odeint", "rk4"), ("odeint", "dopri5"), ("odeint_adjoint", "rk4"))),
    operator("FNO", 2, 8, 8, n_modes=(4, 4), in_channels=2, out_channels=1, hidden_channels=8,
             n_layers=2),
    operator("TFNO", 2, 8, 8, n_modes=(4, 4), in_channels=2, out_channels=1, hidden_channels=8,
             n_layers=2),
    operator("UNO", 2, 8, 8, in_channels=2, out_channels=1, hidden_channels=8, n_layers=3,
             uno_out_channels=[8, 8, 8], uno_n_modes=[[4, 4]] * 3, uno_scalings=[[1, 1]] * 3,
             channel_mlp_skip="linear"),
    Entry("pykan", "KAN", lambda: lib("kan").KAN(
        width=[3, 4, 1], grid=3, k=3, auto_save=False, symbolic_enabled=False), normal(3)),
    *(Entry("snntorch", kind, partial(spiking, kind), normal(5, 4), double=False)
      for kind in ("Leaky", "Synaptic")),
    adapted("LoraConfig", r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    Entry("peft", "DoRA", adapted(
        "LoraConfig", r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True).make,
        lambda m: {"input_ids": torch.randint(0, 32, (m, 8))}),
    adapted("IA3Config", target_modules=["c_attn"], feedforward_modules=[]),
    adapted("PromptTuningConfig", num_virtual_tokens=3),
    adapted("PrefixTuningConfig", num_virtual_tokens=3),
    adapted("VeraConfig", r=2, target_modules=["c_attn"]),
    Entry("sentence-transformers", "BERT, mean, normalised", sentences, padded_words,
          sentence_losses),
    Entry("gpytorch", "ExactGP", gaussian_process, normal(1), mixes=True),
    *(policy(name) for name in ("MLP", "ConvNet", "NoisyLinear", "LSTM", "GRU")),
]  # fmt: skip
