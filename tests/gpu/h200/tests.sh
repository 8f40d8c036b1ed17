#!/usr/bin/env bash
# There: every GPU test, and the checkout's goldens on the GPU. Logs to $OUT; rc of pytest.
set -uo pipefail
source tests/gpu/h200/env.sh
out="${OUT:-/tmp/h3-out}"; mkdir -p "$out"
python3 -m tests.tiny_checkpoints
python3 launch.py parity tests/goldens --device cuda --json "$out/parity.json" 2>&1 | tee "$out/parity.log"
python3 -m pytest -q -rs --durations=15 -m gpu tests/gpu -p no:cacheprovider 2>&1 | tee "$out/pytest.log"
