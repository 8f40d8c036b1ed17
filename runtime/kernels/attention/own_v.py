"""V as a backend of the denoiser takes it: a view of the fused QKV, or a packed copy of that."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.attention.base import Attend
from runtime.kernels.attention.sage_package import rows_first
from runtime.kernels.elementwise.base import Copy


def with_own_v(attend: Attend, *, strided_v: bool, copy: Copy) -> Attend:
    """`attend` for a V that is a view of the fused QKV, as AttentionBackend.strided_v says.

    A V row of 56 heads of 128 strides 21,504 there: element offsets pass 2**31 at 99,864 rows
    (R01), and kernels that count in int32 would read another row. A packed one strides 7,168.
    copy: of the elementwise steps.
    """

    def viewed(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        return attend(q_BHSd, k_BHSd, rows_first(v_BHSd).transpose(1, 2))

    def copied(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        view_BSHd = v_BHSd.transpose(1, 2)
        v_BSHd = torch.empty_like(view_BSHd, memory_format=torch.contiguous_format)
        copy(v_BSHd, view_BSHd)
        return attend(q_BHSd, k_BHSd, v_BSHd.transpose(1, 2))

    return viewed if strided_v else copied
