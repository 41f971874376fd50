"""A tiny model with an adapter whose weights are replaced, and what merged weights say of each of its versions."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from minivllm import LLMEngine, LoRARequest, RequestOutput
from tests.worlds.hunts import HuntWorld, greedy
from tests.worlds.small import write_adapter

PROMPT = list(range(5, 22))  # four full blocks of four, and a token


class VersionedWorld(HuntWorld):
    """The adapter "policy". Its version n has the weights of `folder_of(n)`, unless a test has it otherwise."""

    def folder_of(self, version: int) -> Path:
        folder = self.folder / f"version{version}"
        if not folder.exists():
            write_adapter(folder, seed=100 + version)
        return folder

    def policy(self, **changes: object) -> LoRARequest:
        return LoRARequest(
            **{"lora_name": "policy", "lora_int_id": 7, "lora_path": str(self.folder_of(0)), **changes}
        )

    def update(self, engine: LLMEngine, weights: int, **options: object) -> int:
        """With the tensors of `folder_of(weights)`."""
        tensors = load_file(self.folder_of(weights) / "adapter_model.safetensors")
        return engine.update_lora("policy", tensors, **options)

    def ask_for(
        self, engine: LLMEngine, request_id: str, adapter: object, tokens: int = 6, **params: object
    ) -> None:
        """Add a request for `PROMPT` with logprobs of its tokens."""
        engine.add_request(request_id, PROMPT, greedy(tokens, logprobs=0, **params), lora_request=adapter)

    def logprobs(self, version: int | None, tokens: list[int]) -> torch.Tensor:
        """Of each token behind the first one, by weights to which this version's are added; None = base."""
        lora = None if version is None else self.policy(lora_path=str(self.folder_of(version)))
        engine = self.merged(lora, max_num_batched_tokens=256)
        [output] = self.ask_all(engine, [None], tokens, 1, prompt_logprobs=0)
        told = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
        return torch.tensor([entry[token].logprob for entry, token in told], dtype=torch.float64)

    def check(self, output: RequestOutput, versions: list[int | None]) -> None:
        """The logprob that the engine gave each token is that of the version which is to have sampled it."""
        assert output.error is None, output.error
        answer = output.outputs[0]
        assert len(answer.token_ids) == len(versions), "another number of tokens"
        by_version = {
            version: self.logprobs(version, PROMPT + answer.token_ids)[len(PROMPT) - 1 :]
            for version in set(versions)
        }
        for i, (version, token) in enumerate(zip(versions, answer.token_ids)):
            ours, right = answer.logprobs[i][token].logprob, by_version[version][i].item()
            assert abs(ours - right) < 1e-9, (
                f"token {i} of the answer has the logprob {ours:.6f}; by version {version} alone it is {right:.6f}"
            )
