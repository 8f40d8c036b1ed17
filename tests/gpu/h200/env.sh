# There: source it. Joins the carried parts once and puts them before the image's packages.
if [ ! -d /tmp/h3-site ]; then
  cp .whl/part* /tmp/h3-parts/ 2>/dev/null || true
  mkdir -p /tmp/h3-unpack && cat /tmp/h3-parts/part* | xz -T0 -d | tar -C /tmp/h3-unpack -xf -
  mv /tmp/h3-unpack /tmp/h3-site
fi
# the last is what nvidia_cutlass_dsl's .pth file would add, which PYTHONPATH does not read
export PYTHONPATH=/tmp/h3-site:/tmp/h3-site/nvidia_cutlass_dsl/dsl_packages PYTHONUNBUFFERED=1
