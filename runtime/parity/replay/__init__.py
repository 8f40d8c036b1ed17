"""One file per golden kind; each exposes `replay(golden, checkpoints) -> list[Comparison]`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """The replay module, the stored names it is given, and those it may leave unread.

    Every other stored name must be compared.
    """

    module: str
    given: str
    spare: str = "-"


H3_KINDS = {
    "e2e": Kind("runtime.parity.replay.e2e", r"in/.+"),
    "capture": Kind(
        "runtime.parity.replay.capture",
        r"(in|cond|decode)/.+|sigmas|init_latent/.+",
        # without guidance the sides' own denoised are not stored; audio comes out of a VAE
        r"decode/audio",
    ),
    "te": Kind("runtime.parity.replay.te", r"in/.+"),
    "vae_decode": Kind("runtime.parity.replay.video_vae", r"in/.+"),
    "vae_encode": Kind("runtime.parity.replay.video_vae", r"in/.+"),
    "audio": Kind("runtime.parity.replay.audio_vae", r"in/.+"),
    "schedules": Kind(
        "runtime.parity.replay.schedules", r"solver/(noise|.+/denoised)", "solver/target"
    ),
    "quant": Kind("runtime.parity.replay.quant", r"\d+/(x|bias|weight|\w+/weight\w*)"),
    "layout": Kind("runtime.parity.replay.layout", r"layout_\d+/rows"),
}
LTX_KINDS = {
    "ltx_forward": Kind("runtime.parity.replay.ltx_forward", r"in\..+|diffusers_unhooked\..+"),
    "ltx_rope": Kind("runtime.parity.replay.ltx_rope", r".+\.tokens"),
    "ltx_connectors": Kind(
        "runtime.parity.replay.ltx_connectors", r"in\..+|text_embedding_projection\..+"
    ),
    "ltx_dequant": Kind("runtime.parity.replay.ltx_nvfp4", r"source\..+"),
    "ltx_schedule": Kind("runtime.parity.replay.ltx_sampling", r"unit\.(x|velocity|noise\.\d+)"),
    "ltx_sampler": Kind("runtime.parity.replay.ltx_sampling", r"in\..+"),
    "ltx_linear": Kind("runtime.parity.replay.ltx_nvfp4", r".+\.x"),
}
KINDS = {**H3_KINDS, **LTX_KINDS}
NO_CHECKPOINTS = ("schedules", "quant", "layout", "capture", "ltx_rope", "ltx_schedule")
