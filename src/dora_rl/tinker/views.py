"""What `RestClient` asks for: the base, training runs and what was saved of them.

Reads, and deletes what it is told to. Invariant: an owner sees its own alone.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dora_rl.chat.requests import ApiError
from dora_rl.tinker import requests as asked
from dora_rl.tinker.service import Limits
from dora_rl.tinker.states import Place, States, place_of
from dora_rl.types import UserError

PAGE_MAX = 1000


class Views:
    def __init__(self, states: States, limits: Limits, context_max: int) -> None:
        self._states, self._limits, self._context_max = states, limits, context_max

    def capabilities(self, owner: str) -> dict[str, Any]:
        size = {"max_context_length": self._context_max, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name} | size for name in self._limits.names]}

    def weights_info(self, owner: str, body: bytes) -> dict[str, Any]:
        path = asked.read(asked.WEIGHTS, body)["tinker_path"]
        _, entry = self._found(path, owner)
        names = ("base_model", "train_unembed", "train_mlp", "train_attn")
        known = {name: entry[name] for name in names}
        return known | {"is_lora": True, "lora_rank": entry["rank"]}

    def runs(self, owner: str, limit: int, offset: int) -> dict[str, Any]:
        limit, offset = min(max(limit, 0), PAGE_MAX), max(offset, 0)
        models = self._states.models(owner)
        page = list(models)[offset : offset + limit]
        return {
            "training_runs": [self.run(owner, name) for name in page],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(models)},
        }

    def run(self, owner: str, model: str) -> dict[str, Any]:
        try:
            entry = self._states.model(model, owner)
        except UserError as error:
            raise ApiError(404, str(error)) from None
        saved = self._listed(model, owner)
        last = {one["checkpoint_type"]: one for one in saved}
        return {
            "training_run_id": model,
            "base_model": entry["base_model"],
            "model_owner": owner,
            "is_lora": True,
            "lora_rank": entry["rank"],
            "last_request_time": saved[-1]["time"] if saved else _time(entry["created"]),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": entry.get("user_metadata"),
        }

    def checkpoints(self, owner: str, model: str) -> dict[str, Any]:
        try:
            return {"checkpoints": self._listed(model, owner)}
        except UserError as error:
            raise ApiError(404, str(error)) from None

    def delete(self, owner: str, model: str, checkpoint: str) -> dict[str, Any]:
        place, _ = self._found(f"tinker://{model}/{checkpoint}", owner)
        self._states.delete(place)
        return {}

    def _found(self, path: str, owner: str) -> tuple[Place, dict[str, Any]]:
        try:
            place_of(path)
            return self._states.find(path, owner)
        except UserError as error:
            raise ApiError(404, str(error)) from None

    def _listed(self, model: str, owner: str) -> list[dict[str, Any]]:
        found = self._states.listed(model, owner)
        return [self._checkpoint(place, entry) for place, entry in found]

    def _checkpoint(self, place: Place, entry: dict[str, Any]) -> dict[str, Any]:
        expires = entry.get("expires")
        return {
            "checkpoint_id": f"{place.kind}/{place.name}",
            "checkpoint_type": "training" if place.kind == "weights" else "sampler",
            "time": _time(entry["created"]),
            "tinker_path": str(place),
            "size_bytes": self._states.num_bytes(place),
            "user_metadata": entry.get("checkpoint_metadata"),
            "expires_at": None if expires is None else _time(expires),
        }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
