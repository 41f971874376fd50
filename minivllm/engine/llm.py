"""Many prompts at once, from Python. Stands for vllm/entrypoints/llm.py (v0.22.1)."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from minivllm.engine.llm_engine import LLMEngine, Prompt
from minivllm.engine.llm_thread import LLMThread, Outputs
from minivllm.engine.outputs import RequestOutput
from minivllm.engine_args import EngineArgs, refuse_unknown_options
from minivllm.errors import for_each
from minivllm.lora.request import LoRARequest
from minivllm.progress import ProgressBar
from minivllm.sampling_params import SamplingParams
from minivllm.text.prompts import chat_prompts

Params = SamplingParams | Sequence[SamplingParams] | None
LoRAs = LoRARequest | str | Sequence[LoRARequest | str | None] | None


class LLM:
    """An engine in a thread that steps it. vLLM: `LLM`.

    Options are those of `EngineArgs`: `LLM(model, enable_lora=True, max_loras=4, max_lora_rank=32)`.
    Any number of threads may call it: their requests run in one batch.

    llm_engine   the engine, for whoever asks it about counters or adapters while nothing is generated
    """

    engine_class: type[LLMEngine] = LLMEngine

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        refuse_unknown_options(options)
        args = EngineArgs(model, **options)
        self._thread = LLMThread(partial(self.engine_class.from_engine_args, args))
        self.llm_engine = self._thread.engine

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
        outputs: Outputs = SimpleQueue()
        try:
            ids = self._thread.begin(list(zip(prompts, params, loras)), outputs)
            finished = self._wait(len(ids), outputs, use_tqdm)
        except BaseException:
            self._thread.abandon(outputs)
            raise
        return [finished[request_id] for request_id in ids]

    def update_lora(
        self, adapter: str | int, weights: Mapping[str, Any] | str | os.PathLike[str], **options: Any
    ) -> int:
        """As `LLMEngine.update_lora`, between two steps of whoever generates."""
        return self._thread.call(lambda engine: engine.update_lora(adapter, weights, **options))

    def _wait(self, total: int, outputs: Outputs, use_tqdm: bool) -> dict[str, RequestOutput]:
        """The last output of so many requests, by id."""
        finished: dict[str, RequestOutput] = {}
        num_tokens = 0
        # miniters=0: a step that ends nobody moves the bar, too, for whoever waits for one long answer.
        with ProgressBar(
            total=total, desc="Processed prompts", disable=not use_tqdm, delay=2, miniters=0
        ) as bar:
            while len(finished) < total:
                of_a_step = outputs.get()
                if isinstance(of_a_step, Exception):
                    raise of_a_step
                ended = {output.request_id: output for output in of_a_step if output.finished}
                finished |= ended
                num_tokens += sum(
                    len(answer.delta_token_ids) for output in of_a_step for answer in output.outputs
                )
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                bar.update(len(ended))
        return finished

    def chat(
        self,
        messages: list[dict[str, str]] | Sequence[list[dict[str, str]]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRAs = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the tokenizer's chat template; otherwise as `generate`.

        The tokenizer is an adapter's own where it adds tokens and brings one; its template, too, if it has any.
        ValueError for an engine without a tokenizer, and for what the template cannot take.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        loras = for_each(lora_request, len(conversations), "lora_request")
        prompts = self._thread.call(lambda engine: chat_prompts(engine, conversations, loras))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def get_tokenizer(self, lora_request: LoRARequest | str | None = None) -> Any:
        """The model's, or that of an adapter's requests."""
        return self._thread.call(lambda engine: engine.get_tokenizer(lora_request))


def _reload_once(loras: Iterable[LoRARequest | str | None]) -> Iterator[LoRARequest | str | None]:
    """Each prompt that orders a reload waits for those before it: one order is enough for all."""
    seen: set[LoRARequest | str | None] = set()
    for lora in loras:
        if isinstance(lora, LoRARequest) and lora in seen:
            yield replace(lora, load_inplace=False)
        else:
            yield lora
            seen.add(lora)
