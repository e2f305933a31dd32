"""The directory of the server: what survives it.

    base.json                               which base all of this belongs on
    versions/N/                             sealed snapshots; 0 is the base without an adapter
    models/MODEL/model.json                 owner, adapters, base
    models/MODEL/weights/NAME/              a saved state: state.json, adapter, optimizer
    models/MODEL/sampler_weights/NAME.json  a named snapshot: its version

Never looks into tensors. Whoever asks is an owner, and sees what is its own. Invariants: a state is
there as a whole or not at all; one server at a time has the directory; a version that no name and
no client has is removed at the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from dora_rl.trainer.checkpoints.state import load_tensors, save_tensors, write_atomically
from dora_rl.types import UserError, Version
from dora_rl.weights.private import lock_now, open_own
from dora_rl.weights.store import DiskWeightStore

Kind = Literal["weights", "sampler_weights"]
SCHEME = "tinker://"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
MODEL = re.compile(
    r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,10}"
)  # as large as a number of `requests.SEQ`
STATE, ADAPTER, OPTIMIZER = "state.json", "adapter.safetensors", "optimizer.safetensors"
BASE_VERSION = 0


@dataclass(frozen=True, slots=True)
class Place:
    """What a path names: `tinker://MODEL/weights/NAME`."""

    model: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


def place_of(path: str) -> Place:
    model, _, rest = path.removeprefix(SCHEME).partition("/")
    kind, _, name = rest.partition("/")
    fits = path.startswith(SCHEME) and MODEL.fullmatch(model) and NAME.fullmatch(name)
    if not fits or kind not in ("weights", "sampler_weights"):
        raise UserError("a path looks like tinker://MODEL/weights/NAME or …/sampler_weights/NAME")
    return Place(model, kind, name)


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise UserError("a name has 1 to 128 letters, digits, '_', '-' and '.', no '.' in front")
    return name


class States:
    """`DIR` of `serve --tinker DIR`."""

    def __init__(self, root: Path, base: str, now: Callable[[], float] = time.time) -> None:
        """`base` is the checksum of the weights that everything is on."""
        self.root, self.base, self._now = root, base, now
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = open_own(root / ".lock")
        if not lock_now(self._lock, fcntl.LOCK_EX):
            os.close(self._lock)
            raise UserError(f"--tinker {root}: another server has this directory")
        self._check_base()
        self.store = DiskWeightStore(root / "versions")
        self._sweep()
        self._newest = max((BASE_VERSION, *self.store.versions()))

    def close(self) -> None:
        """Another server may have the directory."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _check_base(self) -> None:
        file = self.root / "base.json"
        if not file.exists():
            file.write_text(json.dumps({"checksum": self.base}) + "\n")
        found = _read(file).get("checksum")
        if found != self.base:
            raise UserError(
                f"--tinker {self.root} belongs to a base with checksum {str(found)[:12]}, this one "
                f"has {self.base[:12]}; give another directory"
            )

    def _sweep(self) -> None:
        named = {entry["version"] for _, entry in self._snapshots()}
        self.store.discard(v for v in self.store.versions() if v not in {*named, BASE_VERSION})
        for left in self.root.glob("models/*/weights/.*"):
            target = left.with_name(left.stem.removeprefix("."))
            if left.suffix == ".old" and not target.exists():
                left.rename(target)  # it had stepped aside for one that was never whole
            else:
                shutil.rmtree(left)

    def _snapshots(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for file in sorted(self.root.glob("models/*/sampler_weights/*.json")):
            yield file, _read(file)

    def new_version(self) -> Version:
        """Never given twice while this server runs."""
        self._newest += 1
        return self._newest

    # -- models ----------------------------------------------------------------------------------

    def add_model(self, model: str, entry: dict[str, Any]) -> None:
        """Before anything of it is saved."""
        folder = self._model(model)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "model.json", entry | {"created": self._now()})

    def model(self, model: str, owner: str) -> dict[str, Any]:
        entry = _read(self._model(model) / "model.json") if MODEL.fullmatch(model) else {}
        if not entry or entry["owner"] != owner:
            raise UserError(f"there is no training run '{model[:100]}' of yours")
        return entry

    def models(self, owner: str) -> dict[str, dict[str, Any]]:
        found = {file.parent.name: _read(file) for file in self.root.glob("models/*/model.json")}
        mine = {name: entry for name, entry in found.items() if entry["owner"] == owner}
        return dict(sorted(mine.items(), key=lambda one: -one[1]["created"]))

    def forget_model(self, model: str) -> None:
        """Where nothing of it was saved, nothing of it stays."""
        folder = self._model(model)
        if not any(folder.glob("weights/*")) and not any(folder.glob("sampler_weights/*")):
            shutil.rmtree(folder, ignore_errors=True)

    # -- saved states and named snapshots --------------------------------------------------------

    def save(
        self,
        place: Place,
        entry: dict[str, Any],
        adapters: dict[str, Tensor],
        moments: dict[str, Tensor],
        overwrite: bool,
    ) -> None:
        target = self._folder(place)
        if target.exists() and not overwrite:
            raise UserError(f"{place} is there already; pass overwrite=True or another name")

        def fill(folder: Path) -> None:
            save_tensors(folder / ADAPTER, adapters)
            save_tensors(folder / OPTIMIZER, moments)
            _write(folder / STATE, entry | {"created": self._now()})

        write_atomically(target, fill)

    def load(self, place: Place) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        folder = self._folder(place)
        return load_tensors(folder / ADAPTER), load_tensors(folder / OPTIMIZER)

    def name_snapshot(self, place: Place, version: Version, entry: dict[str, Any]) -> None:
        """The version is sealed; an older one of the name goes."""
        file = self._file(place)
        before = _read(file).get("version")
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, entry | {"version": version, "created": self._now()})
        if before is not None:
            self.store.discard([before])

    def find(self, path: str, owner: str) -> tuple[Place, dict[str, Any]]:
        """What a path names, with what its model is; raises where it is not the owner's."""
        place = place_of(path)
        entry = self._entry(place)
        missing = UserError(f"there is nothing of yours at {path[:200]}")
        if not entry:
            raise missing
        try:
            return place, self.model(place.model, owner) | entry
        except UserError:
            raise missing from None

    def listed(self, model: str, owner: str) -> list[tuple[Place, dict[str, Any]]]:
        """All that was saved of a model, oldest first."""
        self.model(model, owner)
        folder = self._model(model)
        places = [Place(model, "weights", one.name) for one in folder.glob("weights/[!.]*")]
        places += [
            Place(model, "sampler_weights", one.stem)
            for one in folder.glob("sampler_weights/*.json")
        ]
        found = ((place, self._entry(place)) for place in places)
        return sorted((one for one in found if one[1]), key=lambda one: one[1]["created"])

    def delete(self, place: Place) -> None:
        """A snapshot that is resident goes on until its clients are done."""
        if place.kind == "weights":
            folder = self._folder(place)
            gone = folder.with_name(f".{folder.name}.gone")  # half of it must not have its name
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            shutil.rmtree(gone)
            return
        version = self._entry(place)["version"]
        self._file(place).unlink()
        self.store.discard([version])

    def expire(self) -> list[Place]:
        """Remove what was saved for a limited time; returns what went."""
        gone: list[Place] = []
        for file in self.root.glob("models/*/model.json"):
            model, owner = file.parent.name, _read(file).get("owner")
            for place, entry in self.listed(model, owner) if owner is not None else ():
                if (entry.get("expires") or self._now() + 1) <= self._now():
                    self.delete(place)
                    gone.append(place)
        return gone

    def num_bytes(self, place: Place) -> int:
        folder = self._folder(place)
        if place.kind == "sampler_weights":
            folder = self.store.root / f"{self._entry(place)['version']:08d}"
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def _entry(self, place: Place) -> dict[str, Any]:
        """Empty where there is nothing."""
        folder = self._folder(place)
        return _read(folder / STATE if place.kind == "weights" else self._file(place))

    def _model(self, model: str) -> Path:
        return self.root / "models" / model

    def _folder(self, place: Place) -> Path:
        return self._model(place.model) / place.kind / place.name

    def _file(self, place: Place) -> Path:
        folder = self._folder(place)
        return folder.with_name(f"{folder.name}.json")


def _read(file: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None


def _write(file: Path, entry: dict[str, Any]) -> None:
    """As a whole or not at all."""
    fresh = file.with_name(f".{file.name}.new")
    with fresh.open("w") as out:
        out.write(json.dumps(entry, indent=1) + "\n")
        out.flush()
        os.fsync(out.fileno())
    fresh.rename(file)
