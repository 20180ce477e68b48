"""Pooling and resampling of images."""

from __future__ import annotations

from torch import Tensor

from heldin.capture.ownership.flow import Flow, OpCall, Owners, everything, flows, over
from heldin.capture.ownership.planes import canonical, merge


def _spatial(count: int) -> Flow:
    """Return the flow of ops that mix the last dimensions only."""

    def function(call: OpCall) -> Owners:
        source = next(v for v in call.args.values() if isinstance(v, Tensor))
        result = over(call.owners(source), range(-count, 0))
        return [result] * len(call.outs)

    return function


_SPATIAL = (
    "avg_pool{}d", "max_pool{}d", "max_pool{}d_with_indices", "adaptive_avg_pool{}d",
    "_adaptive_avg_pool{}d", "adaptive_max_pool{}d", "upsample_nearest{}d",
    "fractional_max_pool{}d", "_upsample_nearest_exact{}d", "upsample_bilinear{}d",
    "upsample_linear{}d",
    "upsample_trilinear{}d", "upsample_bicubic{}d", "_upsample_bilinear{}d_aa",
    "_upsample_bicubic{}d_aa",
)  # fmt: skip
for _count in (1, 2, 3):
    flows(*(name.format(_count) for name in _SPATIAL))(_spatial(_count))


@flows("im2col", "col2im", "grid_sampler_2d", "grid_sampler_3d", "affine_grid_generator")
def _per_first(call: OpCall) -> Owners:
    """Handle ops on (N, ...) that treat the N entries independently."""
    sources = [v for v in call.args.values() if isinstance(v, Tensor)]
    if any(s.dim() < 2 or s.shape[0] != call.out.shape[0] for s in sources):
        return everything(call)
    parts = [p.flatten(2).amax(2) for p in call.owned(sources) if p.dim() > 2]
    joined = canonical(merge(parts))
    return [joined.reshape(*joined.shape, *[1] * (out.dim() - 1)) for out in call.outs]


@flows(
    "linalg_inv_ex", "linalg_cholesky_ex", "linalg_solve_ex", "_linalg_solve_ex", "linalg_qr",
    "_linalg_svd", "_linalg_eigh", "_linalg_det", "linalg_lu_factor_ex", "_linalg_slogdet",
    "linalg_matrix_exp", "triangular_solve", "linalg_solve_triangular", "cholesky_solve",
    "cholesky_inverse", "linalg_pinv", "linalg_lstsq", "linalg_eig", "linalg_lu_solve",
)  # fmt: skip
def _matrices(call: OpCall) -> Owners:
    """Handle batched linear algebra, in which the matrices are independent."""
    parts = [over(p, [-1, -2]) for p in call.owned() if p.dim() > 2]
    results: list[Tensor | None] = []
    for out in call.outs:
        same = [p for p in parts if p is not None and p.dim() - 1 >= out.dim()]
        if len(same) != len(parts):
            return everything(call)
        whole = merge(same)
        batch = whole.dim() - 3
        results.append(whole.reshape(*whole.shape[: batch + 1], *[1] * (out.dim() - batch)))
    return results
