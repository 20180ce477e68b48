"""heldin in loops with Lightning's Fabric: `EarlyStopping`."""

from __future__ import annotations

from typing import Any

from .adapters.arguments import needs_framework
from .early_stopping import EarlyStopping as PlainEarlyStopping
from .errors import HeldinError
from .rules.progress import is_main_process

with needs_framework("Fabric", "lightning"):
    from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer

__all__ = ["EarlyStopping"]

NAME = "heldin.fabric.EarlyStopping"
WHOLE = (SingleDeviceStrategy, DDPStrategy)  # every process has all weights


class EarlyStopping(PlainEarlyStopping):
    """Stops a loop with a `Fabric`, on one device or with DDP.

    As `heldin.EarlyStopping`, with the model, the optimiser and the loader that `fabric.setup` and
    `fabric.setup_dataloaders` returned. A loop in mixed precision needs `train_step`, a function of
    a batch that takes one step with `fabric.backward`. At the end one line says what was chosen,
    why the run stopped and what to expect, unless `verbose` is false.

    >>> import torch
    >>> from lightning.fabric import Fabric
    >>> from heldin.fabric import EarlyStopping
    >>> fabric = Fabric(accelerator="cpu", devices=1)
    >>> x = torch.randn(20, 4)
    >>> rows = torch.utils.data.TensorDataset(x, x[:, :1])
    >>> model = torch.nn.Linear(4, 1)
    >>> model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=5))
    >>> loss_fn = torch.nn.MSELoss()
    >>> stopping = EarlyStopping(model, optimizer, loss_fn, loader, verbose=False)
    >>> for epoch in stopping.epochs(3):
    ...     for inputs, targets in loader:
    ...         optimizer.zero_grad()
    ...         fabric.backward(loss_fn(model(inputs), targets))
    ...         optimizer.step()
    >>> stopping.estimates["loss"].value > 0
    True
    """

    def __init__(
        self, model: Any, optimizer: Any, loss_fn: Any = None, data: Any = None, *args: Any,
        batch_loss: Any = None, verbose: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        if not isinstance(model, _FabricModule) or not isinstance(optimizer, _FabricOptimizer):
            raise HeldinError(f"{NAME}: give model and optimizer as fabric.setup returned them")
        strategy = model._strategy
        if not isinstance(strategy, WHOLE):
            raise HeldinError(
                f"{NAME}: {type(strategy).__name__} shards or moves the weights; use one device or "
                "DDP, or heldin.EarlyStopping with fully_shard in a loop of your own"
            )
        precision = strategy.precision.precision
        if "mixed" in precision and options.get("train_step") is None:
            raise HeldinError(
                f"{NAME}: precision {precision!r} needs fabric.backward in every step, also of "
                "shadows; give train_step=, a function of a batch"
            )
        if precision != "32-true" and (loss_fn or batch_loss):
            user_loss, output_loss = batch_loss, loss_fn

            def batch_loss(_: Any, batch: Any) -> Any:  # Fabric casts inputs and outputs
                if user_loss:
                    return user_loss(model, batch)
                return output_loss(model(*batch[:-1]), batch[-1])

            loss_fn = None
        if isinstance(data, _FabricDataLoader):
            data = data._dataloader
        super().__init__(
            model._forward_module, optimizer.optimizer, loss_fn, data, *args,
            batch_loss=batch_loss, **options,
        )  # fmt: skip
        self._verbose = verbose

    def _finish(self) -> None:
        super()._finish()
        message = self.conclusion  # in every process
        if self._verbose and is_main_process():
            print(f"EarlyStopping: {message}")
