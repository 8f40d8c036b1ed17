# There: source it. Joins the carried parts once and installs the wheels beside the image's packages.
if [ ! -d /tmp/h3-site ]; then
  cp .whl/part* /tmp/h3-parts/ 2>/dev/null || true
  mkdir -p /tmp/h3-wheels && cat /tmp/h3-parts/part* | tar -C /tmp/h3-wheels -xf -
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/h3-site \
    /tmp/h3-wheels/*.whl
fi
export PYTHONPATH=/tmp/h3-site PYTHONUNBUFFERED=1
