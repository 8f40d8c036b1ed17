#!/usr/bin/env bash
# There: keep a carried part outside the checkout (the next call replaces .whl).
set -euo pipefail
mkdir -p /tmp/h3-parts && cp .whl/part* /tmp/h3-parts/ && ls -la /tmp/h3-parts
