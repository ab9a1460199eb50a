#!/usr/bin/env bash
# As run_one_box.sh, on the boxes of a Ray cluster. All of them need the same Python environment, the model, and DIRECTORY on
# a file system that they share; the server's URL has to be one that all of them reach. On each box, before:
#
#   export ERRATA_TOKEN=...                    # where the server wants one: errata.token_env=ERRATA_TOKEN
#   ray start --head                           # on the first box
#   ray start --address=FIRST:6379             # on each other one
#
# and then, on the first one:
#
#   ERRATA_URL=http://FIRST:8000 NODES=4 DIRECTORY=/shared/run examples/verl/run_ray.sh [OVERRIDE...]
set -euo pipefail
: "${ERRATA_URL:?is not set: the URL of the server, as all boxes reach it}"
: "${NODES:?is not set: the number of boxes}"
exec "$(dirname "${BASH_SOURCE[0]}")/run_one_box.sh" \
    +ray_kwargs.ray_init.address="${RAY_ADDRESS:-auto}" trainer.nnodes="$NODES" "$@"
