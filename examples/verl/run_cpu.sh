#!/usr/bin/env bash
# As run_one_box.sh, on a CPU, in a checkout: a tiny model follows a script, by the plugin of tests/verl. `make test-verl`
# runs it on both environments, and makes the model and the data that DIRECTORY has to hold (tests/verl/cpu_run.py).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0
export VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:-tests.verl.cpu_plugin}
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore
: "${DIRECTORY:?is not set: the directory of model and data}"
CONFIG=cpu MODEL="$DIRECTORY/model" exec "$here/run_one_box.sh" "$@"
