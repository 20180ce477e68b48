"""Cases: flat batches, in which samples lie one after the other."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .common import M, add, linear, model

# as many rows in each, shared out in another way
_SIZES = iter(
    [([2, 3, 4, 3], [4, 3, 2, 3], [3, 3, 3, 3], [1, 5, 5, 1])[i % 4] for i in range(4000)]
)


def graphs(sizes: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nodes, edges, attributes of edges, and the graph that each node is of."""
    sizes = next(_SIZES) if sizes is None else sizes
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pairs = zip(sizes, starts, strict=True)
    edges = torch.cat([torch.randint(0, n, (2, 2 * n)) + start for n, start in pairs], 1)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return torch.randn(len(owner), 3), edges, torch.randn(edges.shape[1], 2), owner


def _passed_on(s: Any, x: Tensor, edges: Tensor, attributes: Tensor) -> Tensor:
    h = s.a(x).tanh()
    sent = h[edges[0]] + s.e(attributes)
    return s.b(torch.zeros_like(h).index_add(0, edges[1], sent.to(h.dtype)) + h).tanh()


def _pooled(h: Tensor, owner: Tensor, m: int) -> Tensor:
    return torch.zeros(m, h.shape[1], dtype=h.dtype).index_add(0, owner, h)


class Net(nn.Module):
    """Two layers of messages, pooled for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.e, self.b, self.c = (nn.Linear(*s) for s in ((3, 4), (2, 4), (4, 4), (4, 2)))

    def run(self, x: Tensor, edges: Tensor, attributes: Tensor, owner: Tensor) -> Tensor:
        h = _passed_on(self, x, edges, attributes)
        return self.c(_pooled(h, owner, int(owner.max()) + 1))


class Flat(Net):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        return self.run(x, edge_index, edge_attr, batch)


class OfBatch(Net):
    def forward(self, data: Batch) -> Tensor:
        return self.run(data.x, data.edge_index, data.edge_attr, data.batch)


class Batch:
    """What the batches of torch_geometric have that we look at."""

    def __init__(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> None:
        self.x, self.edge_index, self.edge_attr, self.batch = x, edge_index, edge_attr, batch
        self.num_graphs = int(batch.max()) + 1
        nodes, edges = (_starts(o, self.num_graphs) for o in (batch, batch[edge_index[0]]))
        self._slice_dict = {"x": nodes, "edge_index": edges, "edge_attr": edges}
        self.stores = [{k: v for k, v in vars(self).items() if isinstance(v, Tensor)}]

    def __cat_dim__(self, key: str, value: Tensor, *_: Any) -> int:
        return -1 if key == "edge_index" else 0


def _starts(owner: Tensor, m: int) -> Tensor:
    return torch.cat([torch.zeros(1).long(), torch.bincount(owner, minlength=m).cumsum(0)])


add("graphs in a flat batch", Flat, graphs, autocast=False)
add("a batch of graphs as one object", OfBatch, lambda: (Batch(*graphs()),), autocast=False)
_turns = iter([([2, 3], [4], [1, 1, 3], [2, 2, 2, 2, 1])[i % 4] for i in range(4000)])
add("any number of graphs, also one", Flat, lambda: graphs(next(_turns)), autocast=False)
add(
    "rows whose owner is told",
    model(lambda s, x, who: _pooled(s.a(x).tanh(), who, M), a=linear(3, 2)),
    lambda: graphs()[::3],
    autocast=False,
    batch_dim={1: "owner"},
)
add(
    "rows whose owner is told, and nothing in the model looks at it",
    model(lambda s, x, who: s.a(x).tanh(), a=linear(3, 2)),
    lambda: graphs()[::3],
    lambda s, x, who: _pooled(s(x, who).square(), who, M).sum(1),
    autocast=False,
    batch_dim={1: "owner"},
)


class WithFeatures(Net):
    """Graphs have features, too: as many rows as there are samples."""

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, u: Tensor
    ) -> Tensor:
        return self.run(x, edge_index, edge_attr, batch) + self.c(self.a(u).tanh())


add(
    "graphs with features of their own",
    WithFeatures,
    lambda: (*graphs(), torch.randn(M, 3)),
    autocast=False,
)
_single_nodes = iter([([1] * M, [2, 3], [1, 1])[i % 3] for i in range(3000)])
add("graphs of one node", Flat, lambda: graphs(next(_single_nodes)), autocast=False)
_edges = iter([(0, 24)[i % 2] for i in range(3000)])


def _with_edges(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, edges, attributes, owner = graphs()
    return x, edges[:, :count], attributes[:count], owner


add("graphs without edges at times", Flat, lambda: _with_edges(next(_edges)), autocast=False)


class WithLonely(Net):
    """A bias for what each node receives; some receive nothing."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        sent = self.a(x)[edge_index[0]] * self.e(edge_attr)
        received = torch.zeros(len(x), 4).index_add(0, edge_index[1], sent) + self.b.bias
        return self.c(_pooled(received.tanh(), batch, int(batch.max()) + 1))


def _few_edges(edges: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, pairs, attributes, owner = graphs()
    chosen = torch.randperm(pairs.shape[1])[:edges]
    return x, pairs[:, chosen], attributes[chosen], owner


for _count in (0, 7, 12):  # 12: as many as nodes
    add(
        f"graphs with {_count} edges, nodes that none leads to",
        WithLonely,
        lambda count=_count: _few_edges(count),
        autocast=False,
    )
add(
    "batches of graphs without edges",
    OfBatch,
    lambda: (Batch(*_few_edges(0)),),
    autocast=False,
)


def changed(change: Any) -> tuple[Batch]:
    """A batch whose nodes or edges were changed after it was put together."""
    batch = Batch(*graphs())
    change(batch)
    batch.stores = [{k: v for k, v in vars(batch).items() if isinstance(v, Tensor)}]
    return (batch,)


def _other_edges(batch: Batch, chosen: Tensor) -> None:
    batch.edge_index, batch.edge_attr = batch.edge_index[:, chosen], batch.edge_attr[chosen]


def _other_nodes(batch: Batch) -> None:
    order = torch.randperm(len(batch.x))
    batch.x, batch.batch = batch.x[order], batch.batch[order]
    batch.edge_index = order.argsort()[batch.edge_index]


def _loops(batch: Batch) -> None:
    own = torch.arange(len(batch.x))
    batch.edge_index = torch.cat([batch.edge_index, torch.stack([own, own])], 1)
    batch.edge_attr = torch.cat([batch.edge_attr, torch.randn(len(own), 2)])


for _name, _change in {
    "edges in another order": lambda b: _other_edges(b, torch.randperm(b.edge_index.shape[1])),
    "fewer edges": lambda b: _other_edges(b, torch.rand(b.edge_index.shape[1]) > 0.4),
    "nodes in another order": _other_nodes,
    "loops": _loops,
}.items():
    add(
        f"a batch of graphs, changed since it was put together: {_name}",
        OfBatch,
        lambda change=_change: changed(change),
        autocast=False,
    )


class WithLoops(Net):
    """Each node sends to itself, too, with attributes that belong to nobody."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        own = torch.arange(len(x))
        begin, end = torch.cat([edge_index, torch.stack([own, own])], 1)
        sent = self.e(torch.cat([edge_attr, torch.zeros(len(x), 2)])).view(-1, 2, 2)
        sent = (sent + self.a(x)[begin].view(-1, 2, 2)).tanh()
        received = torch.zeros(len(x), 2, 2).index_add(0, end, sent).flatten(1)
        return self.c(self.b(_pooled(received, batch, int(batch.max()) + 1)))


add(
    "attributes of nobody, put among those of samples by a view",
    WithLoops,
    graphs,
    autocast=False,
)


# --- dataclasses and mappings with an index of owners -----------------------------------------


@dataclass
class Molecules:
    """A batch as chemprop builds it: from a list that is no field of it."""

    parts: InitVar[tuple[Tensor, Tensor, Tensor, Tensor]]
    V: Tensor = field(init=False)
    E: Tensor = field(init=False)
    edge_index: Tensor = field(init=False)
    rev_edge_index: Tensor = field(init=False)
    batch: Tensor = field(init=False)
    size: int = field(init=False)
    name: str = field(init=False)  # never set

    def __post_init__(self, parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        self.V, edges, attributes, self.batch = parts
        count = edges.shape[1]
        self.edge_index = torch.cat([edges, edges.flip(0)], 1)
        self.E = torch.cat([attributes, attributes])
        self.rev_edge_index = torch.cat([torch.arange(count) + count, torch.arange(count)])
        self.size = int(self.batch.max()) + 1


class OfMolecules(Net):
    """Messages along directed bonds, without those that come straight back."""

    def forward(self, bmg: Molecules) -> Tensor:
        start, end = bmg.edge_index
        first = (self.a(bmg.V)[start] + self.e(bmg.E)).tanh()
        received = torch.zeros(len(bmg.V), 4, dtype=first.dtype).index_add(0, end, first)
        second = (first + self.b(received[start] - first[bmg.rev_edge_index])).tanh()
        nodes = torch.zeros(len(bmg.V), 4, dtype=first.dtype).index_add(0, end, second)
        return self.c(_pooled(nodes, bmg.batch, bmg.size))


class OfMapping(Net):
    def forward(self, data: dict[str, Tensor]) -> Tensor:
        return self.run(data["x"], data["edge_index"], data["edge_attr"], data["batch"])


add(
    "a dataclass with an InitVar: molecules",
    OfMolecules,
    lambda: (Molecules(graphs()),),
    autocast=False,
)
for _count in (0, 6):  # 6: with their reverses, as many as nodes
    add(
        f"molecules with {_count} bonds",
        OfMolecules,
        lambda count=_count: (Molecules(_few_edges(count)),),
        autocast=False,
    )
add(
    "graphs in a mapping",
    OfMapping,
    lambda: (dict(zip(("x", "edge_index", "edge_attr", "batch"), graphs(), strict=True)),),
    autocast=False,
)
