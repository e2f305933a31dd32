#!/usr/bin/env bash
# An environment with the public tinker SDK, for the tests in this directory: `make test-tinker`.
#     tests/tinker_sdk/install.sh .venv-tinker .venv
# Its versions of common libraries are not those of constraints.txt, so they come first on the path
# and everything else from the second environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv="${1:-.venv-tinker}" base="${2:-.venv}"
test -x "$venv/bin/python" || "$base/bin/python" -m venv "$venv"
version=$(PYTHONPATH=src "$base/bin/python" -c "from dora_rl.tinker import SDK_VERSION; print(SDK_VERSION)")
"$venv/bin/pip" install -q "tinker==$version"
site=$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
"$base/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$site/zz_base.pth"
pwd | sed 's|$|/src|' >> "$site/zz_base.pth"
