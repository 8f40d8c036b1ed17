# There: source it. Joins the carried parts once and puts them before the image's packages. The folder's
# name matters: quack-kernels takes functions under `site-packages` as foreign, and refuses to look into others.
if [ ! -d /tmp/h3-env/site-packages ]; then
  cp .whl/part* /tmp/h3-parts/ 2>/dev/null || true
  mkdir -p /tmp/h3-unpack && cat /tmp/h3-parts/part* | xz -T0 -d | tar -C /tmp/h3-unpack -xf -
  mkdir -p /tmp/h3-env && mv /tmp/h3-unpack /tmp/h3-env/site-packages
fi
# the last is what nvidia_cutlass_dsl's .pth file would add, which PYTHONPATH does not read
export PYTHONPATH=/tmp/h3-env/site-packages:/tmp/h3-env/site-packages/nvidia_cutlass_dsl/dsl_packages PYTHONUNBUFFERED=1
