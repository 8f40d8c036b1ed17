#!/usr/bin/env bash
# There: a full-size random checkpoint set in the published layout, STEPS (2) steps of the reference shape
# through `generate`, with float frames (no media) and with an mp4. Random weights serve for speed and
# memory, not for pictures. Results to $OUT.
set -euo pipefail
source tests/gpu/h200/env.sh
out="${OUT:-/tmp/h3-out}"; set_folder=/dev/shm/h3-full; mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
python3 launch.py make-demo --size full --format pruned_nvfp4 --out "$set_folder"
python3 - "$out" <<'PY'
import sys
import numpy as np
from PIL import Image
noise = np.random.default_rng(0).integers(0, 256, (544, 960, 3), dtype=np.uint8)
Image.fromarray(noise).save(f"{sys.argv[1]}/reference.png")
PY
run() {
  python3 launch.py generate --plan tests/gpu/h200/plan_nvfp4_dequant.toml \
    --request reference_960x544_124f --steps "${STEPS:-2}" --ref-image "$out/reference.png" "$@"
}
run --no-media --out /tmp/h3-run-frames 2>&1 | tee "$out/frames.log"
run --out /tmp/h3-run-media 2>&1 | tee "$out/media.log"
cp /tmp/h3-run-frames/run.json "$out/frames.json"
cp /tmp/h3-run-media/run.json "$out/media.json"
