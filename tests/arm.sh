#!/usr/bin/env bash
# The claims of bits (tests/support/bit_claims.py) on an emulated ARM CPU, and on this
# machine as it is and with older instruction sets. Prints a table: claim x CPU.
#
#     tests/arm.sh [FOLDER]    # FOLDER keeps the ARM system between runs; takes 10 to 40 minutes
#
# Needs Debian's packages mmdebstrap and qemu-user-static, a Debian mirror, and a Python
# with JAX, optax and NumPy as `python`. Emulation shows what a compiler for ARM makes of
# the programs. It cannot show SVE, BF16 instructions or the cores of one vendor.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$(realpath -m "${1:-$(mktemp -d)}")
python=${PYTHON:-python}
version() { "$python" -c "import importlib.metadata as m; print(m.version('$1'))"; }

if [ ! -d "$root/site" ]; then
  # Unpacked only: nothing of it has to run while it is set up.
  mmdebstrap --quiet --variant=extract --arch=arm64 bookworm "$root/system" \
    --include=python3.11-minimal,libpython3.11-stdlib,libstdc++6,zlib1g,libexpat1,libffi8,libssl3,libbz2-1.0,liblzma5
  "$python" -m pip install -q --target "$root/site" --only-binary=:all: --implementation cp --python-version 3.11 \
    --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 \
    "jax==$(version jax)" "jaxlib==$(version jaxlib)" "optax==$(version optax)"
fi

claims() { JAX_PLATFORMS=cpu PYTHONPATH="$1$PWD" "${@:2}" tests/support/bit_claims.py; }
for isa in native AVX2 AVX SSE4_2; do
  flags=$([ "$isa" = native ] || echo "--xla_cpu_max_isa=$isa")
  XLA_FLAGS="$flags" claims "" "$python" >"$root/$isa" 2>/dev/null || true
done
PYTHONHOME="$root/system/usr" claims "$root/site:" \
  qemu-aarch64-static -L "$root/system" "$root/system/usr/bin/python3.11" >"$root/aarch64" || true

echo "$(date +%F), JAX $(version jax), $(grep -m 1 'model name' /proc/cpuinfo | cut -d: -f2)"
printf '%-28s' claim && printf '%-16s' native AVX2 AVX SSE4_2 aarch64 && echo
cut -c 1-28 "$root/native" | while read -r claim; do
  printf '%-28s' "$claim"
  for cpu in native AVX2 AVX SSE4_2 aarch64; do
    printf '%-16.14s' "$(grep -F "$claim" "$root/$cpu" | cut -c 29- || echo 'did not run')"
  done
  echo
done
