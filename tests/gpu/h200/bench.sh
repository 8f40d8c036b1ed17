#!/usr/bin/env bash
# There: the matrix of docs/benchmarks on full-size random weights, which are made on the GPU (no files).
# Usage: bench.sh [CASE...] (all of them without one; ten minutes end a call, so name a few). Each case is
# one `launch.py bench`: the whole result to $OUT/bench.jsonl, what a person wants to read to stdout.
# Power and clocks need psutil and nvidia-ml-py: carry .whl/nvlink (`nvlink.sh carry` fetches it).
set -uo pipefail
source tests/gpu/h200/env.sh
source tests/gpu/h200/plans.sh
nvml=/tmp/h3-nvlink-site
if [ -d .whl/nvlink ] && [ ! -d "$nvml" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$nvml" .whl/nvlink/*.whl
fi
[ ! -d "$nvml" ] || export PYTHONPATH="$PYTHONPATH:$nvml"
out="${OUT:-/tmp/h3-out}"; mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader

ltx_request() { # ltx_request WIDTH HEIGHT FRAMES: a file of that size
  printf 'family = "ltx"\nprompt = ""\nwidth = %s\nheight = %s\nframes = %s\nfps = 24\n' "$@" > "$P/ltx_$1.request.toml"
}

bench() { # bench CASE SECONDS options...
  local name="$1" limit="$2"; shift 2
  local began=$SECONDS
  timeout "$limit" python3 launch.py bench --record-to "$out/bench.jsonl" "$@" > /tmp/h3-bench.txt 2> /tmp/h3-bench.err
  local rc=$?
  [ "$rc" = 0 ] || tail -n 2 /tmp/h3-bench.err
  python3 - "$name" "$rc" $((SECONDS - began)) <<'PY'
import json
import sys
name, rc, seconds = sys.argv[1:]
lines = open("/tmp/h3-bench.txt").read().splitlines()
try:
    told = json.loads(lines[-1])
except (IndexError, ValueError):
    told = {}
def short(value):
    return [round(value[key], 4) for key in ("median", "min", "max")]
def steps(of):
    return {"step": short(of["step_seconds"]),
            "parts": {part: round(own["median"], 4) for part, own in of["parts"].items()}}
subjects = [
    {
        "name": one["name"],
        **({f"stage {of['stage']}": steps(of) for of in one["sampling"]} if "sampling" in one else steps(one)),
        "stages": {stage: short(own) for stage, own in one["stages"].items()},
        "outside": round(one["outside_seconds"]["median"], 3),
        "load": round(one["load_seconds"], 1),
        "peak_gib": [round(one[f"peak_{kind}_bytes"] / 2**30, 2) for kind in ("allocated", "reserved")],
        "watts": one["gpu"].get("power_watts", {}).get("median", one["gpu"].get("reason")),
        "mhz": one["gpu"].get("sm_clock_mhz", {}).get("median"),
        "attention": one["resolved"].get("attention"),
        **({"profile": {k: round(v, 4) for k, v in one["profile"]["seconds"].items()},
            "unclassified": one["profile"]["top"].get("unclassified", [])} if "profile" in one else {}),
    }
    for one in told.get("subjects", ())
]
def of_step(ratio):
    return {k: ratio[k] if k == "step" else short(ratio[k]) for k in ratio}
ratio = told.get("ratio", {})
ratio = of_step(ratio) if "step" in ratio else {stage: of_step(own) for stage, own in ratio.items()}
print(json.dumps({"case": name, "rc": int(rc), "s": int(seconds), "S": told.get("rows", told.get("tokens")),
                  "order": told.get("order"), "ratio": ratio, "subjects": subjects,
                  **({} if subjects else {"reason": told.get("reason", "")})}), flush=True)
PY
}

plan exact
plan exact_flash attention=sdpa
plan eager elementwise=eager
plan fa4 attention=fa4
plan quack attention=fa4 dense=quack
plan sage2 attention=sage2
plan fp8_rowwise_fa4 attention=fa4 dense=fp8_rowwise
plan fp8_tensorwise_fa4 attention=fa4 dense=fp8_tensorwise
plan fp8_rowwise_sage2 attention=sage2 dense=fp8_rowwise
plan ck_int8 attention=ck_int8
plan sol attention=sol
plan nvfp4_packed attention=fa4
plan nvfp4_cached attention=fa4 weights=cached
plan offloaded adaln=offloaded
plan graphs graphs=true kernel_times=false
plan no_meter kernel_times=false
plan low memory=low
plan vae_tiles1 elementwise=eager vae_tiles=1
plan vae_fp32 video_vae_dtype=fp32
plan resident attention=fa4 text_encoder=resident

for measured in false true; do # stage 1 is bound by the CPU that launches: timing its calls would slow ours alone
  printf '%s\n' 'family = "ltx"' 'device = "cuda"' 'dtype = "bf16"' 'attention = "sdpa_cudnn"' 'video_vae_dtype = "bf16"' \
    "kernel_times = $measured" '[models]' 'dit = "random"' 'text_encoder = "random"' 'video_vae = "random"' \
    'audio_vae = "random"' > "$P/ltx_$measured.toml"
done
ltx_request 768 512 97
ltx_request 1280 704 121

media=(); python3 -c 'import av' 2> /dev/null || media=(--no-media)  # carried with WITH_AV=1
bf16=(--text-rows 300 --random-weights pruned_bf16)
ltx=(--random-weights bf16 --random-size full --no-decode)
declare -A run=(
  [exact]='bench exact 110 --plan $P/exact.toml "${bf16[@]}" --runs 4'
  [peer]='bench peer 170 --plan $P/exact.toml --peer diffusers "${bf16[@]}" --runs 3'
  [peer_native]='bench peer_native 150 --plan $P/exact_flash.toml --peer diffusers --peer-attention native "${bf16[@]}" --no-decode --runs 2'
  [fa4]='bench fa4 120 --plan $P/exact.toml --against $P/fa4.toml "${bf16[@]}" --no-decode'
  [quack]='bench quack 120 --plan $P/fa4.toml --against $P/quack.toml "${bf16[@]}" --no-decode'
  [sage2]='bench sage2 120 --plan $P/exact.toml --against $P/sage2.toml "${bf16[@]}" --no-decode'
  [fp8_rowwise]='bench fp8_rowwise 120 --plan $P/exact.toml --against $P/fp8_rowwise_fa4.toml "${bf16[@]}" --no-decode'
  [fp8_tensorwise]='bench fp8_tensorwise 120 --plan $P/fp8_rowwise_fa4.toml --against $P/fp8_tensorwise_fa4.toml "${bf16[@]}" --no-decode'
  [fp8_sage2]='bench fp8_sage2 110 --plan $P/fp8_rowwise_sage2.toml "${bf16[@]}" --no-decode'
  [ck_int8]='bench ck_int8 110 --plan $P/ck_int8.toml "${bf16[@]}" --no-decode --runs 2'
  [sol]='bench sol 110 --plan $P/sol.toml "${bf16[@]}" --no-decode --runs 2'
  [elementwise]='bench elementwise 120 --plan $P/eager.toml --against $P/exact.toml "${bf16[@]}" --no-decode'
  [graphs]='bench graphs 120 --plan $P/no_meter.toml --against $P/graphs.toml "${bf16[@]}" --no-decode'
  [low]='bench low 120 --plan $P/exact.toml --against $P/low.toml "${bf16[@]}" --no-decode'
  [nvfp4]='bench nvfp4 120 --plan $P/nvfp4_packed.toml --against $P/nvfp4_cached.toml --text-rows 300 --random-weights pruned_nvfp4 --no-decode'
  [nvfp4_memory]='bench nvfp4_memory 110 --plan $P/nvfp4_packed.toml --text-rows 300 --random-weights pruned_nvfp4 --runs 2'
  [full]='bench full 170 --plan $P/offloaded.toml --text-rows 300 --random-weights full_bf16 --runs 2'
  [vae]='bench vae 120 --plan $P/vae_tiles1.toml --against $P/exact.toml "${bf16[@]}" --steps 1'
  [vae_fp32]='bench vae_fp32 150 --plan $P/vae_fp32.toml "${bf16[@]}" --steps 1 --runs 2'
  [repeat]='bench repeat 200 --plan $P/resident.toml --request reference_960x544_124f --steps 2 --random-weights pruned_nvfp4 ${media[@]+"${media[@]}"} --repeat-request'
  [ltx]='bench ltx_768 150 --plan $P/ltx_false.toml --peer diffusers "${ltx[@]}" --request $P/ltx_768.request.toml --runs 3
    bench ltx_1280 170 --plan $P/ltx_false.toml --peer diffusers "${ltx[@]}" --request $P/ltx_1280.request.toml --runs 3'
  [ltx_parts]='bench ltx_parts 170 --plan $P/ltx_true.toml --against $P/ltx_true.toml --against-weights nvfp4 "${ltx[@]}" --request $P/ltx_1280.request.toml --runs 2'
  [profile]='bench profile 120 --plan $P/exact.toml "${bf16[@]}" --no-decode --runs 1 --profile'
  [profile_peer]='bench profile_peer 170 --plan $P/exact.toml --peer diffusers "${bf16[@]}" --no-decode --runs 1 --profile'
  [profile_fp8]='bench profile_fp8 120 --plan $P/fp8_rowwise_fa4.toml "${bf16[@]}" --no-decode --runs 1 --profile'
)
order=(peer fa4 quack fp8_rowwise fp8_tensorwise nvfp4 nvfp4_memory full vae vae_fp32 profile profile_fp8 repeat graphs
  elementwise sage2 fp8_sage2 low peer_native ck_int8 sol exact profile_peer ltx
  ltx_parts)
for name in "${@:-${order[@]}}"; do
  if [ -z "${run[$name]:-}" ]; then echo "no case $name; there are ${order[*]}"; exit 2; fi
  eval "${run[$name]}"
done
