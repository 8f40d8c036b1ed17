#!/usr/bin/env bash
# There, on a pair (kind nvidia-h200-x2): NVLink bytes of our telemetry against a known copy, and
# `launch.py doctor`. Needs torch of the image, psutil and nvidia-ml-py; what the image lacks of the
# last two travels in .whl/nvlink, which this fetches when it runs here:
#   tests/gpu/h200/nvlink.sh carry     # then run, with carry=[".whl/nvlink"]: bash tests/gpu/h200/nvlink.sh
# JSON to $OUT/nvlink.json; the exit status is that of the check.
set -euo pipefail
cd "$(dirname "$0")/../../.."
if [ "${1:-}" = carry ]; then
  rm -rf .whl/nvlink && mkdir -p .whl/nvlink
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --abi cp312 --abi abi3 --abi none \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64 \
    -d .whl/nvlink "nvidia-ml-py>=13,<14" "psutil>=7,<8"
  ls -la .whl/nvlink
  exit 0
fi
out="${OUT:-/tmp/h3-out}"; mkdir -p "$out"
site=/tmp/h3-nvlink-site
if [ ! -d "$site" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/nvlink/*.whl
fi
export PYTHONPATH="$site" PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv
nvidia-smi topo -m | tee "$out/topology.txt"
python3 launch.py doctor --plan h200x1_sdpa > "$out/doctor.txt" || true  # no checkpoints there
tail -n 40 "$out/doctor.txt" | cut -c1-160
set +e
python3 -m tests.gpu.nvlink_check | tee "$out/nvlink.json"
exit "${PIPESTATUS[0]}"
