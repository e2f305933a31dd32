"""Certificates that openssl makes for a test: authorities, and what they sign."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dora_rl.io.proof import Certificates

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def authority(folder: Path, name: str) -> None:
    files = ("-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem")
    openssl("req", "-x509", *KEY, *files, "-days", "2", "-subj", f"/CN={name}")


def signed(folder: Path, name: str, by: str) -> Certificates:
    request, made = f"{folder}/{name}.csr", f"{folder}/{name}.pem"
    openssl("req", *KEY, "-keyout", f"{folder}/{name}.key", "-out", request, "-subj", f"/CN={name}")
    signer = ("-CA", f"{folder}/{by}.pem", "-CAkey", f"{folder}/{by}.key", "-CAcreateserial")
    openssl("x509", "-req", "-in", request, *signer, "-days", "2", "-out", made)
    return Certificates(made, f"{folder}/{name}.key", f"{folder}/{by}.pem")
