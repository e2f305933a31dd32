"""Writes down what the SDK sends, for the tests that run without it.

    .venv-tinker/bin/python -m tests.tinker_sdk.record tests/vectors/tinker_sdk.json

Of each request: method, path, body, and of the answer its status, type, keys and promise.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import tinker
import torch
from tinker import types

from tests.kit.tinker_server import KEY, tinker_server

LEFT_OUT = ("telemetry", "heartbeat")


def recording(log: list[dict[str, Any]]) -> None:
    real = httpx.AsyncClient.send

    async def send(self: Any, request: httpx.Request, **how: Any) -> httpx.Response:
        body = await request.aread()
        response = await real(self, request, **how)
        await response.aread()
        form = request.headers.get("content-type", "")
        kind = response.headers.get("content-type", "")
        answer = response.json() if "json" in kind else {}
        if not any(word in request.url.path for word in LEFT_OUT):
            log.append(
                {
                    "method": request.method,
                    "path": request.url.path,
                    "type": form,
                    "body": body.hex() if "protobuf" in form else body.decode(),
                    "status": response.status_code,
                    "answer_type": kind,
                    "keys": sorted(answer),
                    "promise": answer.get("request_id"),
                }
            )
        return response

    httpx.AsyncClient.send = send  # type: ignore[method-assign]


def datum(ids: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)


def sparse(rows: list[list[float]], dtype: torch.dtype) -> types.TensorData:
    return types.TensorData.from_torch_sparse(torch.tensor(rows, dtype=dtype))


def talk(url: str) -> None:
    """Everything that this server knows, once."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    trainer = client.create_lora_training_client("tiny", rank=4, seed=3).result()
    first = datum([2, 3, 4, 5], target_tokens=[3, 4, 5, 6], weights=[1.0] * 4)
    batch = [first, datum([7, 8, 9], target_tokens=[8, 9, 10], weights=[0.0, 1.0, 1.0])]
    adam = types.AdamParams(learning_rate=3e-3, weight_decay=0.01, grad_clip_norm=50.0)
    for _ in range(3):
        both = trainer.forward_backward(batch, "cross_entropy"), trainer.optim_step(adam)
        for one in both:
            one.result()
    targets = sparse([[3] + [0] * 7, [4, 5] + [0] * 6], torch.int64)
    weights = sparse([[1.0] + [0.0] * 7, [0.5, 0.5] + [0.0] * 6], torch.float32)
    wide = datum([2, 3], target_tokens=targets, weights=weights)
    trainer.forward([wide], "cross_entropy").result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    how = types.SamplingParams(
        max_tokens=5, temperature=0.7, seed=5, top_k=8, top_p=0.9, stop=["7"]
    )
    more: dict[str, Any] = {"topk_sample_logprobs": 2, "topk_prompt_logprobs": 3}
    prompt = types.ModelInput.from_ints([2, 3, 4])
    sampler.sample(prompt, 2, how, include_prompt_logprobs=True, **more).result()
    sampler.compute_logprobs(prompt, prompt_logprobs_last_n=1).result()
    drawn = datum(
        [2, 3, 4], target_tokens=[3, 4, 5], logprobs=[0.0, -1.0, -2.0], advantages=[0.0, 1.0, -1.0]
    )
    clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    for name, config in (("importance_sampling", None), ("ppo", clip), ("dro", {"beta": 0.1})):
        trainer.forward_backward([drawn], name, config).result()  # type: ignore[arg-type]
    path = trainer.save_state("one").result().path
    trainer.save_weights_for_sampler("named", ttl_seconds=7200).result()
    client.create_training_client_from_state_with_optimizer(path).result()
    trainer.load_state(path).result()
    client.create_sampling_client(base_model="tiny").result()
    named = f"tinker://{trainer.model_id}/sampler_weights/named"
    client.create_sampling_client(model_path=named).result()
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    rest.get_server_capabilities().result()
    rest.get_weights_info_by_tinker_path(path).result()
    rest.list_training_runs().result()
    rest.list_checkpoints(trainer.model_id).result()
    rest.delete_checkpoint(trainer.model_id, "weights/one").result()
    client.close("success").result()


if __name__ == "__main__":
    log: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, tinker_server(Path(folder)) as served:
        recording(log)
        talk(served.server.url)
    lines = ",\n".join(json.dumps(entry) for entry in log)
    Path(sys.argv[1]).write_text(f'{{"sdk": "{tinker.__version__}", "log": [\n{lines}\n]}}\n')
    print(f"{len(log)} requests of tinker {tinker.__version__}")
