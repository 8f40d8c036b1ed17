# There: source it. Plans of random weights for bench.sh and pair.sh, each a file of $P.
P=/tmp/h3-plans; mkdir -p "$P"
plan() { # plan NAME 'field = value'...: over the exact plan of this card; the weights are random
  local file="$P/$1.toml"
  python3 - "$file" "${@:2}" <<'PY'
import sys
fields = {"device": '"cuda"', "dtype": '"bf16"', "attention": '"sdpa_cudnn"', "elementwise": '"triton"',
          "vae_attention": '"sdpa_cudnn"', "video_vae_dtype": '"fp16"', "vae_tiles": "15",
          "text_encoder": '"stream"'}
for given in sys.argv[2:]:
    key, _, value = given.partition("=")
    value = value.strip()
    plain = value in ("true", "false") or value.replace(".", "").isdigit()
    fields[key.strip()] = value if plain else f'"{value}"'
models = [f'{role} = "random"' for role in ("dit", "text_encoder", "video_vae", "audio_vae")]
lines = [f"{key} = {value}" for key, value in fields.items()]
open(sys.argv[1], "w").write("\n".join([*lines, "[models]", *models]) + "\n")
PY
}
