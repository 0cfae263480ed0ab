#!/bin/sh
# Makes the virtual environment for the peer that elasticdl's own does not hold: torchft.
# Goes into the user's cache directory; delete the folder to be rid of it.
set -eu
# Without compiled files each start takes seconds longer.
unset PYTHONDONTWRITEBYTECODE
python=${PYTHON:-python3}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/elasticdl/peers/torchft
[ -x "$folder/bin/torchft_lighthouse" ] && { echo "torchft is there: $folder"; exit 0; }
rm -rf "$folder"
"$python" -m venv "$folder"
# The measured loops import elasticdl.
"$folder/bin/pip" install --quiet torch==2.13.0 torchft-nightly==2026.10.26 "$(dirname "$0")/../.."
echo "torchft is ready: $folder"
