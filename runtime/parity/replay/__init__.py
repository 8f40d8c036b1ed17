"""One file per golden kind; each exposes `replay(golden, checkpoints) -> list[Comparison]`."""

KINDS = {
    "e2e": "runtime.parity.replay.e2e",
    "te": "runtime.parity.replay.te",
    "vae_decode": "runtime.parity.replay.video_vae",
    "vae_encode": "runtime.parity.replay.video_vae",
    "audio": "runtime.parity.replay.audio_vae",
    "schedules": "runtime.parity.replay.schedules",
    "quant": "runtime.parity.replay.quant",
    "layout": "runtime.parity.replay.layout",
}
