"""Graphs, molecules and symmetries. A sample is a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heldin_lab.zoo.entry import Batch, Entry, lib, normal

__all__ = ["ENTRIES"]


def graphs(m: int) -> Batch:
    """Lists of the nodes, the edges and the edges' attributes of graphs with 5 to 7 nodes."""
    sizes = [int(n) for n in torch.randint(5, 8, (m,))]
    edges = [torch.randint(0, n, (2, 3 * n)) for n in sizes]
    return [torch.randn(n, 4) for n in sizes], edges, [torch.randn(3 * n, 2) for n in sizes]


def batched(m: int) -> Batch:
    """The same as one batch of torch_geometric."""
    data = lib("torch_geometric.data")
    found = [data.Data(*three) for three in zip(*graphs(m), strict=True)]
    return (data.Batch.from_data_list(found),)


def flat(m: int) -> Batch:
    """The same as the tensors of such a batch: what most models are called with."""
    data: Any = batched(m)[0]  # type: ignore[index]
    return data.x, data.edge_index, data.edge_attr, data.batch


def alike(m: int) -> Batch:
    """Dense graphs, with an adjacency matrix each."""
    return torch.randn(m, 5, 4), (torch.rand(m, 5, 5) > 0.5).double()


class OfGraphs(nn.Module):
    """A network on the nodes of graphs, pooled for each of them."""

    def __init__(self, net: nn.Module, readout: str = "mean", edges: bool = False) -> None:
        super().__init__()
        self.net, self.readout, self.edges = net, readout, edges

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Any:
        more = {"edge_attr": edge_attr} if self.edges else {}
        pool = getattr(lib("torch_geometric.nn"), f"global_{self.readout}_pool")
        return pool(self.net(x, edge_index, **more), batch)


class OfBatches(OfGraphs):
    """The same for the library's own batches."""

    def forward(self, data: Any) -> Any:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, data.edge_attr, data.batch)


class OfLists(OfGraphs):
    """The same for lists of graphs."""

    def forward(  # type: ignore[override]
        self, nodes: list[Tensor], edges: list[Tensor], attributes: list[Tensor]
    ) -> Any:
        sizes = [len(each) for each in nodes]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        joined = torch.cat([e + start for e, start in zip(edges, starts, strict=True)], 1)
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        return super().forward(torch.cat(nodes), joined, torch.cat(attributes), owner)


def on_graphs(name: str, readout: str = "mean", edges: bool = False, **options: Any) -> Entry:
    def make() -> nn.Module:
        return OfGraphs(getattr(lib("torch_geometric.nn"), name)(**options), readout, edges)

    return Entry("torch-geometric", name, make, flat, mixes=False)


def molecules(m: int) -> Batch:
    """The numbers of atoms, their places, and the molecule that each is of."""
    sizes = torch.randint(3, 6, (m,))
    owner = torch.repeat_interleave(torch.arange(m), sizes)
    return torch.randint(1, 9, (len(owner),)), torch.randn(len(owner), 3), owner


def of_atoms(name: str, **options: Any) -> Entry:
    def make() -> nn.Module:
        net: nn.Module = getattr(lib("torch_geometric.nn"), name)(**options)
        return net

    return Entry("torch-geometric", name, make, molecules, mixes=False)


class Through(nn.Module):
    """A function of a library's layers."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = forward

    def forward(self, *args: Any) -> Any:
        return self._function(self, *args)


def tensor_product() -> nn.Module:
    o3 = lib("e3nn.o3")
    product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "3x0e + 1x1o")
    return Through(lambda s, x, y: s.product(x, y), product=product)


def gated() -> nn.Module:
    o3, e3 = lib("e3nn.o3"), lib("e3nn.nn")
    gate = e3.Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
    return nn.Sequential(o3.Linear("4x0e + 2x1o", gate.irreps_in), gate)


HIDDEN: dict[str, Any] = {"in_channels": 4, "hidden_channels": 8, "num_layers": 2}
ENTRIES = [
    on_graphs("GCN", **HIDDEN, out_channels=3),
    on_graphs("GraphSAGE", **HIDDEN, out_channels=3),
    on_graphs("GIN", "add", **HIDDEN, out_channels=3),
    on_graphs("GAT", **HIDDEN, out_channels=3, heads=2),
    on_graphs("EdgeCNN", "max", **HIDDEN, out_channels=3),
    on_graphs("PNAConv", in_channels=4, out_channels=4, aggregators=["mean", "max", "std"],
              scalers=["identity", "amplification"], deg=torch.tensor([1, 2, 3, 4, 3, 2])),
    on_graphs("TransformerConv", in_channels=4, out_channels=4, heads=2, edge_dim=2, edges=True),
    on_graphs("GATv2Conv", in_channels=4, out_channels=4, edge_dim=2, edges=True),
    on_graphs("NNConv", in_channels=4, out_channels=3, nn=nn.Linear(2, 12), edges=True),
    on_graphs("ChebConv", in_channels=4, out_channels=3, K=2),
    on_graphs("SGConv", in_channels=4, out_channels=3, K=2),
    on_graphs("TAGConv", in_channels=4, out_channels=3),
    on_graphs("ARMAConv", in_channels=4, out_channels=3, num_stacks=2),
    on_graphs("GatedGraphConv", out_channels=4, num_layers=2),
    on_graphs("SuperGATConv", in_channels=4, out_channels=3),
    on_graphs("GENConv", in_channels=4, out_channels=3, norm=None),
    on_graphs("FiLMConv", in_channels=4, out_channels=3),
    of_atoms("SchNet", hidden_channels=8, num_filters=8, num_interactions=2, num_gaussians=4,
             interaction_graph=lambda pos, batch: _near(pos, batch)),
    Entry("torch-geometric", "GCN on a Batch", lambda: OfBatches(lib("torch_geometric.nn").GCN(
        **HIDDEN, out_channels=3)), batched, mixes=False),
    Entry("torch-geometric", "GIN on lists of graphs", lambda: OfLists(lib(
        "torch_geometric.nn").GIN(**HIDDEN, out_channels=3)), graphs, mixes=False),
    Entry("torch-geometric", "DenseGCNConv", lambda: lib(
        "torch_geometric.nn").DenseGCNConv(4, 3), alike),
    Entry("torch-geometric", "DenseSAGEConv", lambda: lib(
        "torch_geometric.nn").DenseSAGEConv(4, 3), alike),
    Entry("e3nn", "FullyConnectedTensorProduct", tensor_product,
          lambda m: (torch.randn(m, 10), torch.randn(m, 4))),
    Entry("e3nn", "Gate", gated, normal(10)),
]  # fmt: skip


def _near(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of atoms in a molecule."""
    apart = torch.eye(len(batch), dtype=torch.bool).logical_not()
    edges = ((batch[:, None] == batch) & apart).nonzero().t()
    return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)
