#!/usr/bin/env bash
# There, on a pair (kind nvidia-h200-x2): what several GPUs have to show, on full-size random weights.
# Usage: pair.sh CASE...; one call ends after ten minutes, so name a few (seconds on a pair in brackets):
#   tests (150)              every test of two GPUs
#   exchange (40)            an exchange and attention alone and at once; NCCL with high priority too
#   ATTENTION-OVERLAP-TRANSPORT (90 to 140), as sdpa_cudnn-off-collective or fa4-off-copy_engine:
#                            `launch.py sweep --layouts U2`, STEPS steps (6), more options in SWEEP,
#                            more plan fields in FIELDS (row_split=9984:10110)
# Here, before: `PAIR=1 tests/gpu/h200/carry.sh`, then one `run` per part with take.sh. Results to
# $OUT/sweeps.jsonl. An environment variable of a call (TORCH_NCCL_HIGH_PRIORITY=1) holds for all its cases.
set -uo pipefail
source tests/gpu/h200/env.sh
source tests/gpu/h200/plans.sh
out="${OUT:-/tmp/h3-out}"; mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader

sweep() { # sweep CASE
  local attention overlap transport
  IFS=- read -r attention overlap transport <<< "$1"
  # shellcheck disable=SC2086  # FIELDS and SWEEP are lists
  plan "$1" "attention=$attention" "overlap=$overlap" "transport=$transport" vae_tiles=5 ${FIELDS-}
  # shellcheck disable=SC2086
  python3 launch.py sweep --plan "$P/$1.toml" --layouts U2 --text-rows 300 --random-weights pruned_bf16 \
    --rounds 1 --steps "${STEPS:-6}" ${SWEEP---no-decode} --record-to "$out/sweeps.jsonl" \
    > "$out/$1.txt" 2> "$out/$1.err"
  echo "rc $?"; grep -v '^{' "$out/$1.txt" || tail -n 3 "$out/$1.err"
}

for name in "$@"; do
  began=$SECONDS; echo "== $name"
  case "$name" in
    tests) python3 -m pytest -q -rs -m multi_gpu tests/gpu/test_parallel_gpu.py tests/gpu/test_guidance_gpu.py \
      > "$out/tests.txt" 2>&1; echo "rc $?"; tail -n 15 "$out/tests.txt" ;;
    exchange) python3 -m tests.gpu.exchange_times
      TORCH_NCCL_HIGH_PRIORITY=1 python3 -m tests.gpu.exchange_times ;;
    *) sweep "$name" ;;
  esac
  echo "$((SECONDS - began)) s"
done
