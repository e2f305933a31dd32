#!/usr/bin/env bash
# An environment with verifiers, reasoning-gym, textarena and OpenEnv, for the tests in this
# directory: `make test-packages`.
#     tests/packages/install.sh .venv-packages .venv
# Their versions of common libraries are not those of constraints.txt, so they come first on the path
# and everything else from the second environment. Of what OpenEnv asks for, the web interface
# (gradio) and the like are left out: neither client nor server needs them.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv="${1:-.venv-packages}" base="${2:-.venv}"
test -x "$venv/bin/python" || "$base/bin/python" -m venv "$venv"
extras=$("$base/bin/python" -c "
import tomllib
extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']
print(*extras['envs'], *extras['verifiers'], *extras['openenv'])")
# shellcheck disable=SC2086
"$venv/bin/pip" install -q $extras
"$venv/bin/pip" install -q --no-deps openenv==0.10.0
site=$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
"$base/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$site/zz_base.pth"
pwd | sed 's|$|/src|' >> "$site/zz_base.pth"
