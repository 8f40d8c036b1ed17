#!/usr/bin/env bash
# There: two plans on the full-size random set in turn, A B A B, STEPS (4) steps of the reference shape,
# float frames. Usage: ab.sh FIELD A B (a field of plan_nvfp4_dequant.toml, such as elementwise eager
# triton). One line per run from its record, to $OUT/ab.txt.
set -euo pipefail
source tests/gpu/h200/env.sh
field="$1"; shift
out="${OUT:-/tmp/h3-out}"; set_folder=/dev/shm/h3-full; mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv
[ -d "$set_folder" ] || python3 launch.py make-demo --size full --format pruned_nvfp4 --out "$set_folder"
python3 - "$out" <<'PY'
import sys
import numpy as np
from PIL import Image
noise = np.random.default_rng(0).integers(0, 256, (544, 960, 3), dtype=np.uint8)
Image.fromarray(noise).save(f"{sys.argv[1]}/reference.png")
PY
for value in "$1" "$2" "$1" "$2"; do
  grep -v "^$field" tests/gpu/h200/plan_nvfp4_dequant.toml | sed "1a $field = \"$value\"" > /tmp/h3-ab.toml
  rm -rf /tmp/h3-ab
  python3 launch.py generate --plan /tmp/h3-ab.toml --request reference_960x544_124f --no-media \
    --steps "${STEPS:-4}" --ref-image "$out/reference.png" --out /tmp/h3-ab > /tmp/h3-ab.log 2>&1
  python3 - "$value" <<'PY' | tee -a "$out/ab.txt"
import json
import statistics
import sys
record = json.load(open("/tmp/h3-ab/run.json"))
def median(stage):
    return statistics.median([s["seconds"] for s in record["stages"] if s["stage"] == stage][1:])
parts = {stage: round(median(stage), 4) for stage in ("denoise", "attention", "GEMM", "other")}
print(json.dumps({"value": sys.argv[1], **parts, "peak": record["result"]["peak_memory_bytes"]}))
PY
done
