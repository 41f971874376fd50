"""Many prompts at once, from Python. Stands for vllm/entrypoints/llm.py (v0.22.1)."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from minivllm.engine.llm_engine import LLMEngine, Prompt
from minivllm.engine.outputs import RequestOutput
from minivllm.engine_args import EngineArgs
from minivllm.errors import for_each
from minivllm.lora.request import LoRARequest
from minivllm.progress import ProgressBar
from minivllm.sampling_params import SamplingParams
from minivllm.serving.shared_engine import Caller, SharedEngine
from minivllm.text.chats import Chats, LoRAs, Params


class LLM(Chats):
    """An engine and a loop around it. vLLM: `LLM`.

    Options are those of `EngineArgs`: `LLM(model, enable_lora=True, max_loras=4, max_lora_rank=32)`.
    Any number of threads may call it: their requests run in one batch.
    """

    engine_class: type[LLMEngine] = LLMEngine

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.llm_engine = self.engine_class.from_engine_args(EngineArgs(model, **options))
        self._shared = SharedEngine(self.llm_engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRAs = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, each with its own adapter if it names one; answers in the order of prompts.

        prompts           text, {"prompt": ...} or {"prompt_token_ids": [...]}; one or a list
        sampling_params   one for all, or a list
        lora_request      one for all, or a list in which None is the base model. A name stands for an adapter that
                          the engine knows or a resolver finds. With `load_inplace` an adapter is read again once
                          a call, not for every prompt

        ValueError if any prompt cannot be served; then none is. A request that fails later has
        finish_reason "error" and says why in `.error`. Nothing is left behind by an error or Ctrl-C.
        """
        prompts = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        default = SamplingParams() if sampling_params is None else sampling_params
        params = for_each(default, len(prompts), "sampling_params")
        loras = _reload_once(for_each(lora_request, len(prompts), "lora_request"))
        with self._shared.caller() as caller:
            caller.begin(list(zip(prompts, params, loras)))
            finished = self._run(caller, use_tqdm)
        return [finished[request_id] for request_id in caller.ids]

    def _run(self, caller: Caller, use_tqdm: bool) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        total, num_tokens = len(caller.ids), 0
        # miniters=0: a step that ends nobody moves the bar, too, for whoever waits for one long answer.
        with ProgressBar(
            total=total, desc="Processed prompts", disable=not use_tqdm, delay=2, miniters=0
        ) as bar:
            while len(finished) < total:
                outputs = caller.take()
                ended = {output.request_id: output for output in outputs if output.finished}
                finished |= ended
                num_tokens += sum(
                    len(answer.delta_token_ids) for output in outputs for answer in output.outputs
                )
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                bar.update(len(ended))
        return finished


def _reload_once(loras: Iterable[LoRARequest | str | None]) -> Iterator[LoRARequest | str | None]:
    """Each prompt that orders a reload waits for those before it: one order is enough for all."""
    seen: set[LoRARequest | str | None] = set()
    for lora in loras:
        if isinstance(lora, LoRARequest) and lora in seen:
            yield replace(lora, load_inplace=False)
        else:
            yield lora
            seen.add(lora)
