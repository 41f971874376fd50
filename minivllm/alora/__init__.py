"""Activated LoRA: adapters that begin at their invocation tokens. In no vLLM (a pull request, #19710, was closed).

Brings      adapters with PEFT's `alora_invocation_tokens` (https://arxiv.org/abs/2512.17910). What comes before the
            last occurrence of these tokens in a prompt is the base model's: its keys and values are found by, and found
            for, the base model and all such adapters. Five of them asked within a conversation of 512 to 900 tokens
            compute 135 tokens instead of 3,735, and the first token is there 22 times as soon (a busy CPU;
            docs/alora.md, activated-cpu-x86-64-2026-11-24.json)
Implements  an `AdapterOption` with a `WrappedOption`, which says what cannot be served; `limits_of` of `EngineCore`,
            around the one that is there: it gives a prompt's `adapter_start`, which the core's `Request` has
Costs       some 150 lines, and nothing for other adapters. An adapter that begins late holds a slot from its first
            token on, and is read tensor by tensor
"""

from typing import TYPE_CHECKING

from minivllm.alora.invocation import ActivatedLoRA
from minivllm.extension import Extension

if TYPE_CHECKING:
    from minivllm.parts import Parts


def _add_to(parts: "Parts") -> None:
    from minivllm.alora.prompts import InvokedPrompts

    make_limits_of = parts.make_limits_of
    parts.make_limits_of = lambda *arguments: InvokedPrompts(make_limits_of(*arguments))


ALORA = Extension({"options": (ActivatedLoRA(),)}, _add_to)
