#!/usr/bin/env bash
# Builds the environment that the peer tools run in: auto-round 0.16.1 with the readers of its formats.
#
#     tools/peers/make_env.sh DIR [PYTHON]
#
# DIR/bin/python is then the interpreter for every script of this folder. DIR/arl holds auto-round-lib (the compiled kernels of
# auto-round's reader); put it on PYTHONPATH to load with them, leave it out to load with plain torch.
# About 1.6 GB and two minutes with a CPU build of torch. torch comes first and is then held, so that nothing replaces its build.
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: $0 DIR [PYTHON]" >&2
    exit 2
fi
directory=$1
python=${2:-python3}

"$python" -m venv "$directory"
pip=("$directory/bin/python" -m pip install --quiet --disable-pip-version-check)
held=$directory/constraints.txt

"${pip[@]}" torch==2.13.0
"$directory/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$held"
"${pip[@]}" -c "$held" transformers==5.24.0 accelerate compressed-tensors==0.20.0 auto-round==0.16.1
"${pip[@]}" --no-deps --target "$directory/arl" auto-round-lib==0.16.0
"$directory/bin/python" -c 'import torch, auto_round; print("auto-round", auto_round.__version__, "torch", torch.__version__)'
