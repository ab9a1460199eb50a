#!/usr/bin/env bash
# Trains a model with VeRL and three channels on the tasks of a server: `errata serve terminal` in another shell.
#
#   examples/verl/run_one_box.sh [OVERRIDE...]        e.g. algorithm.alpha_sdpo=0.2 trainer.total_epochs=1
#
# ERRATA_URL   URL of the server, http://127.0.0.1:8000 without
# ERRATA_ENV   name of the environment, terminal without
# MODEL        name or directory of the model, Qwen/Qwen3-8B without
# DIRECTORY    directory for data and checkpoints, ./verl-run without; the data are made if they are not there
# CONFIG       configuration in this directory, grpo_composer without
# PYTHON       interpreter with openenv-errata[verl] and a rollout engine, python without
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
url=${ERRATA_URL:-http://127.0.0.1:8000}
env=${ERRATA_ENV:-terminal}
directory=${DIRECTORY:-$PWD/verl-run}
python=${PYTHON:-python}

mkdir -p "$directory"
[ -e "$directory/train.parquet" ] || "$python" -c \
    'import sys; from errata_trainer.recipes.verl import write_dataset; print(write_dataset(*sys.argv[1:]), "tasks")' \
    "$directory/train.parquet" "$url" "$env"
exec "$python" -m errata_trainer.recipes.verl --config-dir "$here" --config-name "${CONFIG:-grpo_composer}" \
    errata.url="$url" errata.env="$env" \
    data.train_files="$directory/train.parquet" data.val_files="$directory/train.parquet" \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-8B}" \
    trainer.default_local_dir="$directory/checkpoints" hydra.run.dir="$directory/hydra" "$@"
