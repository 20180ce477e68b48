"""Restricting the use of a vector to its sampled block before tensors are read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from heldin.capture.sampling import Sampler

from .use import OpUse

__all__ = ["narrowed"]

# Rules whose argument is a vector along the last dimension of the output, or along dimension 1.
_ALONG_LAST = {
    "AddmmBackward0", "AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0",
    "NativeLayerNormBackward0",
}  # fmt: skip
_ALONG_CHANNELS = {"ConvolutionBackward0", "NativeBatchNormBackward0"}


@dataclass
class _Narrow(OpUse):
    """A use restricted to some entries along one dimension."""

    at: int = -1  # the dimension, counted from the end
    whole: int = 0  # its full size
    start: int = 0  # first entry of the block, which has use.shape[0] entries

    def saved(self, name: str) -> Tensor:
        tensor = super().saved(name)
        at = 0 if tensor.dim() == 1 else self.at  # statistics of channels are vectors
        if tensor.dim() >= -at and tensor.shape[at] == self.whole:
            return tensor.narrow(at, self.start, self.shape[0])
        return tensor


def narrowed(use: OpUse, sampler: Sampler, name: str) -> OpUse:
    """Restrict the use of a vector to its sampled block, before tensors are read."""
    grad, cache = use.grads[0], use.cache
    if grad is None:
        return use
    at = cache.along
    if at is None:
        at = cache.along = along(use, grad)
    if at == 0:
        return use
    size = use.shape[0]
    reads = grad.numel() // size
    if cache.no_cancellation is None:
        sampler.note(name, reads, False)
        return use
    block, _ = sampler.block(name, use.shape, reads)
    if block is None:
        return use
    start, width = block[0].start, block[0].stop - block[0].start
    part = grad.narrow(at, start, width)
    return _Narrow(use.node, [part], use.layouts, use.argument, (width,), cache, at, size, start)


def along(use: OpUse, grad: Tensor) -> int:
    """Return the dimension of the output, from the end, along which a vector lies; 0: none."""
    layout, node = use.layouts[0], use.node.name()
    if layout is None or layout.dim is None:
        return 0
    at = -1 if node in _ALONG_LAST else 1 - grad.dim() if node in _ALONG_CHANNELS else 0
    fits = at != 0 and grad.shape[at] == use.shape[0] and layout.dim != grad.dim() + at
    return at if fits else 0
