"""In which order a forward rounds: as the model's own code has it, or as ComfyUI's.

Both compute the same; the differences are the last bits, and 4e-6 for the eps. Found on the
goldens, where each form gives the bits of its program (CPU, one thread). Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """qk_eps: of the norm of queries and keys, which is not the config's norm_eps.

    fused_sums: x + out * gate is rounded once after attention (but not to the text) and
    feed-forward. fused_rotation: so is the second product of a rotation. rounded_rope: rotations
    run in the compute dtype, not in fp32. rows_per_token: in fp32 the AdaLN heads run for every
    token, else (as in half types, whose bits it keeps) once per distinct time.
    """

    name: str
    qk_eps: float
    fused_sums: bool
    fused_rotation: bool
    rounded_rope: bool
    rows_per_token: bool


MODEL = Form(
    name="model",
    qk_eps=1e-6,
    fused_sums=False,
    fused_rotation=True,
    rounded_rope=False,
    rows_per_token=True,
)
COMFY = Form(
    name="comfy",
    qk_eps=1e-5,
    fused_sums=True,
    fused_rotation=False,
    rounded_rope=True,
    rows_per_token=False,
)
FORMS = {form.name: form for form in (MODEL, COMFY)}
